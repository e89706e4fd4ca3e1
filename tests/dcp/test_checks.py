"""Per-rank values and optimizer state: what was lost is told, and nothing whole is accused."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from dcp.boxes import whole
from dcp.checks.optimizer import check_optimizers
from dcp.checks.ranks import check_ranks
from dcp.index import CheckpointIndex, Chunk, Chunks, Entry, ObjectEntry, TensorEntry
from dcp.record import Record


def tensor(key: str, shape: tuple[int, ...] = (4,), dtype: str = "float32", rank: int = 0) -> TensorEntry:
    chunk = Chunk(whole(shape), Record(f"__{rank}_0.distcp", 0, 1000))
    return TensorEntry(key, dtype, shape, Chunks.of([chunk]))


def index(*entries: Entry) -> CheckpointIndex:
    return CheckpointIndex({entry.key: entry for entry in entries}, None)


def value(key: str, rank: int = 0) -> ObjectEntry:
    return ObjectEntry(key, Record(f"__{rank}_0.distcp", 0, 1000))


OTHER = value("other", rank=1)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("rng", "rng"),
        ("rng_state", "rng_state"),
        ("trainer.cuda_rng_state.default", "trainer.cuda_rng_state"),
        ("dataloader.epoch", "dataloader"),
        ("state.train_dataloader", "state.train_dataloader"),
        ("sampler/position", "sampler"),
        ("data_position", "data_position"),
        ("consumed_samples", "consumed_samples"),
        ("samples_seen", "samples_seen"),
    ],
)
def test_a_value_of_each_rank_stored_once_is_told_with_its_fix(key: str, name: str) -> None:
    (found,) = check_ranks(index(value(key), OTHER))
    assert (found.code, found.severity, found.key) == ("ranks.shared-value", "warning", key)
    assert f"{name}.rank_R" in found.message


@pytest.mark.parametrize(
    "key",
    [
        "rng.rank_3", "rng/rank_17", "rng_1", "dataloader.dp_rank_0", "random_states_0", "rank_0.rng",
        "lr", "step", "model.layers.0.weight", "rng_state/shard_0.0_1.2", "optim.param_groups.0.betas",
    ],
)  # fmt: skip
def test_what_tells_ranks_apart_or_is_no_such_value_passes(key: str) -> None:
    assert list(check_ranks(index(value(key), OTHER))) == []


def test_weights_are_weights_whatever_their_name() -> None:
    weights = [tensor("model.generator.weight"), tensor("model.data_state", dtype="bfloat16")]
    assert list(check_ranks(index(*weights, OTHER))) == []
    assert len(list(check_ranks(index(tensor("rng", dtype="uint8"), OTHER)))) == 1


def test_one_writer_loses_nothing() -> None:
    assert list(check_ranks(index(value("rng"), value("other")))) == []


def test_what_stands_beside_per_rank_values_is_common() -> None:
    assert (
        list(check_ranks(index(value("dataloader.world_size"), value("dataloader.dp_rank_0"), OTHER))) == []
    )


def test_many_keys_of_one_name_are_one_finding() -> None:
    (found,) = check_ranks(index(value("rng.torch"), value("rng.numpy"), OTHER))
    assert found.detail["keys"] == ["rng.torch", "rng.numpy"]


def adam(parameters: Iterable[str], spelling: str = "optim.state.{p}.{q}") -> list[Entry]:
    return [
        tensor(spelling.format(p=p, q=q), () if q == "step" else (4,))
        for p in parameters
        for q in ("step", "exp_avg", "exp_avg_sq")
    ]


PARAMETERS = [f"layers.{n}.weight" for n in range(5)]
SPELLINGS = ["optim.state.{p}.{q}", "optimizer.state.{p}.{q}", "state.optimizers.AdamW.state.{p}.{q}",
             "optimizer.state.{q}.{p}"]  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_whole_optimizers_pass(spelling: str) -> None:
    model = [tensor(f"model.{p}") for p in PARAMETERS]
    assert (
        list(check_optimizers(index(*model, *adam(PARAMETERS, spelling), tensor("model.buffer")), {})) == []
    )


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_missing_moment_names_both_sides(spelling: str) -> None:
    lost = spelling.format(p=PARAMETERS[2], q="exp_avg_sq")
    entries = [entry for entry in adam(PARAMETERS, spelling) if entry.key != lost]
    (found,) = check_optimizers(index(*entries), {})
    assert (found.code, found.severity) == ("optim.incomplete", "warning")
    assert found.detail["parameter"] == PARAMETERS[2]
    assert found.detail["missing"] == ["exp_avg_sq"]
    assert found.detail["present"] == ["exp_avg", "step"]
    assert found.detail["example"] in found.message


def test_a_parameter_that_its_group_lists_has_no_state_at_all() -> None:
    groups: list[Entry] = [value(f"optimizer.param_groups.{p}.lr") for p in PARAMETERS]
    (found,) = check_optimizers(index(*adam(PARAMETERS[:-1], "optimizer.state.{p}.{q}"), *groups), {})
    assert found.detail["parameter"] == PARAMETERS[-1]
    assert found.detail["missing"] == ["exp_avg", "exp_avg_sq", "step"]


def test_a_moment_of_another_shape() -> None:
    entries = [tensor(f"model.{p}") for p in PARAMETERS] + adam(PARAMETERS)
    entries[1] = tensor("model.layers.1.weight", (5,))
    found = list(check_optimizers(index(*entries), {}))
    assert {f.key for f in found} == {f"optim.state.layers.1.weight.{q}" for q in ("exp_avg", "exp_avg_sq")}
    assert all(f.detail["expected"] == [5] for f in found)


GROUP = "optim.param_groups.0.params"


def test_within_a_group_what_one_has_is_due_to_all() -> None:
    few = [e for e in adam(PARAMETERS) if not e.key.endswith("exp_avg_sq") or ".4." in e.key]
    found = list(check_optimizers(index(*few), {GROUP: PARAMETERS}))
    assert [f.detail["parameter"] for f in found] == PARAMETERS[:4]
    (found_none,) = check_optimizers(index(*adam(PARAMETERS[1:])), {GROUP: PARAMETERS})
    assert found_none.detail["present"] == []
    apart = {GROUP: PARAMETERS[:4], "optim.param_groups.1.params": PARAMETERS[4:]}
    assert list(check_optimizers(index(*few), apart)) == []


def test_vectors_and_matrices_of_one_kind_owe_the_same() -> None:
    shapes = {"w": (4, 4), "b": (4,)}
    entries = [tensor(f"optim.state.{p}.{q}", shapes[p]) for p in shapes for q in ("exp_avg", "exp_avg_sq")]
    (found,) = check_optimizers(index(*entries[:-1]), {GROUP: ["w", "b"]})
    assert (found.detail["parameter"], found.detail["missing"]) == ("b", ["exp_avg_sq"])


def test_vectors_may_have_other_quantities_than_matrices() -> None:
    """As Adafactor keeps them."""
    entries: list[Entry] = [
        tensor("model.w", (4, 4)),
        tensor("model.v", (4, 4)),
        tensor("model.b"),
        tensor("model.c"),
    ]
    for name, quantities in {
        "w": "row_var col_var",
        "v": "row_var col_var",
        "b": "variance",
        "c": "variance",
    }.items():
        entries += [tensor(f"optim.state.{name}.{q}") for q in ("step", *quantities.split())]
    group = {GROUP: ["w", "v", "b", "c"]}
    assert list(check_optimizers(index(*entries), group)) == []
    lost = [e for e in entries if e.key != "optim.state.v.col_var"]
    (found,) = check_optimizers(index(*lost), group)
    assert found.detail["missing"] == ["col_var"]


def test_plain_sgd_and_models_alone_pass() -> None:
    assert list(check_optimizers(index(*[tensor(f"model.state.{p}") for p in PARAMETERS]), {})) == []
    assert list(check_optimizers(index(), {})) == []
