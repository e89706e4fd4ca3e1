"""Keys against a contract: every departure told, renames recognised as rules, drift told as drift."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dcp
from dcp.boxes import whole
from dcp.checks.keys import check_keys
from dcp.contract import contract_of
from dcp.errors import UsageError
from dcp.findings import Finding
from dcp.index import CheckpointIndex, Chunk, Chunks, Entry, ObjectEntry, TensorEntry
from dcp.model_contract import contract_from_model
from dcp.renames import find_renames
from tests.support.train import SavedCheckpoint


def state(*keys: str, shape: tuple[int, ...] = (4,)) -> list[Entry]:
    return [TensorEntry(key, "float32", shape, Chunks.of([Chunk(whole(shape), None)])) for key in keys]


def index(*entries: Entry) -> CheckpointIndex:
    return CheckpointIndex({entry.key: entry for entry in entries}, None)


def compare(expected: list[Entry], actual: list[Entry], **options: object) -> list[Finding]:
    return list(check_keys(contract_of(index(*expected)), index(*actual), **options))  # type: ignore[arg-type]


LAYERS = [f"model.layers.{n}.{name}" for n in range(4) for name in ("wq.weight", "wo.weight", "norm.bias")]


def test_everything_is_told() -> None:
    expected = [*state("a", "b", "gone"), *state("shape"), ObjectEntry("kind", None)]
    dtype = TensorEntry("b", "float16", (4,), expected[1].chunks)  # type: ignore[union-attr]
    actual = [*state("a"), dtype, *state("kind"), *state("shape", shape=(5,)), ObjectEntry("new", None)]
    found = {f.code: f for f in compare(expected, actual)}
    assert {code: f.key for code, f in found.items()} == {
        "keys.missing": "gone",
        "keys.unexpected": "new",
        "keys.dtype": "b",
        "keys.kind": "kind",
        "keys.shape": "shape",
    }
    assert all(f.severity == "error" for f in found.values())
    assert found["keys.shape"].detail["expected"]["shape"] == [4]
    assert found["keys.shape"].detail["actual"]["shape"] == [5]


@pytest.mark.parametrize(
    ("rename", "rule"),
    [
        (lambda k: k.replace("model.", "model.module."), "'module.' was inserted"),
        (lambda k: k.replace("model.", "model._orig_mod."), "'_orig_mod.' was inserted"),
        (
            lambda k: k.replace("layers.", "_fsdp_wrapped_module.layers.").replace(
                ".w", "._fsdp_wrapped_module.w"
            ),
            "'_fsdp_wrapped_module.' was inserted",
        ),
        (
            lambda k: k.replace("layers.0.", "layers.0._checkpoint_wrapped_module."),
            "'_checkpoint_wrapped_module.' was inserted",
        ),
        (lambda k: k.replace("model.", "net."), "'model.' became 'net.'"),
        (lambda k: "state." + k, "'state.' was inserted"),
        (lambda k: k.removeprefix("model."), "'model.' became ''"),
        (lambda k: k + ".v2", "'.v2' was inserted"),
        (lambda k: k.replace("layers", "blocks"), "'layers.' became 'blocks.'"),
    ],
)
def test_one_rule_for_many_keys(rename: Callable[[str], str], rule: str) -> None:
    expected, actual = state(*LAYERS), state(*map(rename, LAYERS))
    changed = {old: rename(old) for old in LAYERS if rename(old) != old}
    (found,) = compare(expected, actual)
    assert found.code == "keys.renamed"
    assert found.detail["renames"] == changed
    assert rule in found.message
    back = compare(actual, expected)
    assert [f.code for f in back] == ["keys.renamed"]


def test_optimizer_spellings() -> None:
    quantities = ("step", "exp_avg", "exp_avg_sq")
    old = state(*[f"optim.state.{q}.{k}" for q in quantities for k in LAYERS])
    new = state(*[f"optim.state.{k}.{q}" for q in quantities for k in LAYERS])
    (found,) = compare(old, new)
    assert found.code == "keys.renamed"
    assert found.detail["count"] == 36


def test_a_merely_similar_name_is_paired_when_it_holds_the_same() -> None:
    (found,) = compare(state("model.embedding.weight", *LAYERS), state("model.embeddings.weight", *LAYERS))
    assert found.code == "keys.renamed"
    codes = {
        f.code for f in compare(state("model.embedding.weight"), state("model.embeddings.weight", shape=(3,)))
    }
    assert codes == {"keys.missing", "keys.unexpected"}
    assert {f.code for f in compare(state("abcdef"), state("uvwxyz"))} == {"keys.missing", "keys.unexpected"}


def test_list_drift_is_told_as_drift() -> None:
    found = compare(state(*LAYERS), state(*[k for k in LAYERS if ".3." not in k]))
    assert {f.key for f in found} == {k for k in LAYERS if ".3." in k}
    assert all(f.detail["drift"] == {"parent": "model.layers", "expected": 4, "actual": 3} for f in found)
    assert all("model.layers has 3 items, 4 were expected" in f.message for f in found)
    grown = compare(state(*[k for k in LAYERS if ".3." not in k]), state(*LAYERS))
    assert all(f.code == "keys.unexpected" for f in grown)
    assert all(f.detail["drift"] == {"parent": "model.layers", "expected": 3, "actual": 4} for f in grown)
    (single,) = compare(state("model.a", "model.b"), state("model.a"))
    assert "drift" not in single.detail
    unlike = compare(state("model.head.weight", "model.norm.scale"), state("model.norm.scale"))
    assert "drift" not in unlike[0].detail
    named = compare(state("model.first.w", "model.second.w", "model.third.w"), state("model.first.w"))
    assert [f.detail["drift"]["actual"] for f in named] == [1, 1]


def test_ignored_keys_are_said_to_be_ignored() -> None:
    extra = ["model.layers.0._extra_state", "dataloader.dp_rank_7"]
    found = compare(state(*LAYERS, *extra), state(*LAYERS))
    assert {(f.code, f.severity) for f in found} == {("keys.ignored", "info")}
    assert {key for f in found for key in f.detail["keys"]} == set(extra)
    assert {f.code for f in compare(state(*LAYERS, *extra), state(*LAYERS), ignore=())} == {"keys.missing"}
    assert compare(state(*LAYERS), state(*LAYERS), ignore=("*",)) == []


@given(
    st.sets(st.text("ab.", min_size=1, max_size=8), max_size=12),
    st.sets(st.text("ab.", min_size=1, max_size=8), max_size=12),
)
def test_renames_never_lose_or_double_a_key(old: set[str], new: set[str]) -> None:
    lost = {key: len(key) % 2 for key in old - new}
    added = {key: len(key) % 2 for key in new - old}
    pairs = [pair for renames in find_renames(lost, added) for pair in renames.pairs]
    assert len({a for a, _ in pairs}) == len({b for _, b in pairs}) == len(pairs)
    assert all(lost[a] == added[b] for a, b in pairs)


def test_ten_thousand_keys_take_no_time() -> None:
    keys = [f"model.layers.{n}.w{m}" for n in range(500) for m in range(20)]
    (found,) = compare(state(*keys), state(*[k.replace("layers", "blocks") for k in keys]))
    assert found.detail["count"] == 10_000


def test_a_model_gives_the_contract_of_what_it_saves(
    fsdp2_checkpoint: SavedCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_training.py").write_text(
        "import torch\n"
        "from tests.support.train import Training, build_model\n"
        "def build():\n"
        "    model = build_model(Training())\n"
        "    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
        "def only_model():\n"
        "    return build()[0]\n"
        "def as_saved():\n"
        "    model, optim = build()\n"
        "    return {'model': model, 'optim': optim, 'step': 0, 'rng': torch.get_rng_state()}\n"
        "def number():\n"
        "    return 3\n"
        "def fails():\n"
        "    raise OSError('no data')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    step = str(fsdp2_checkpoint.path)
    report = dcp.validate(step, contract=contract_from_model("their_training:as_saved"))
    assert [f for f in report.findings if f.code.startswith("keys.")] == []
    partial = dcp.validate(step, contract=contract_from_model("their_training:build"))
    assert {f.key for f in partial.findings if f.code == "keys.unexpected"} == {"step", "rng"}
    assert set(contract_from_model("their_training:only_model").keys) < set(dcp.read_index(step).entries)
    for wrong in (
        "their_training",
        "nothing:x",
        "their_training:x",
        "their_training:number",
        "their_training:fails",
    ):
        with pytest.raises(UsageError, match=wrong.partition(":")[0]):
            contract_from_model(wrong)
