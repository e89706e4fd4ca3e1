"""The load planners in one process, under torch's own `load`, with torch's reader and with ours."""

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import StorageReader

import dcp
from dcp.errors import StateMismatchError, UsageError
from dcp.load.planners import StrictLoadPlanner
from tests.dcp.load.expectations import LOADABLE, expected_tensors, same_bits, save
from tests.support.golden import Golden
from tests.support.train import SavedCheckpoint

Reader = Callable[[str], StorageReader]


@pytest.fixture(params=["bucket", "torch"])
def reader(request: pytest.FixtureRequest) -> Reader:
    readers: dict[str, Reader] = {
        "bucket": lambda path: dcp.BucketReader(path),
        "torch": lambda path: torch_checkpoint.FileSystemReader(path),
    }
    return readers[request.param]


def load(state: dict[str, Any], reader: StorageReader, planner: StrictLoadPlanner) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        warnings.filterwarnings("ignore", category=FutureWarning)
        torch_checkpoint.load(state, storage_reader=reader, planner=planner, no_dist=True)


def refused(state: dict[str, Any], reader: StorageReader, planner: StrictLoadPlanner) -> StateMismatchError:
    with pytest.raises(CheckpointException) as caught:
        load(state, reader, planner)
    [(error, _)] = caught.value.failures.values()
    assert isinstance(error, StateMismatchError)
    return error


def saved(tmp_path: Path) -> str:
    state = {
        "model": {"w": torch.arange(12.0).reshape(4, 3), "b": torch.arange(3.0), "n": torch.ones(2)},
        "step": 7,
        "int_now": 3,
        "tensor_then": torch.ones(1),
        "extra": {"e": torch.zeros(1)},
    }
    return str(save(state, tmp_path / "step"))


def test_everything_that_does_not_fit_is_one_error_and_nothing_is_loaded(
    tmp_path: Path, reader: Reader
) -> None:
    path = saved(tmp_path)
    for file in Path(path).glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))  # to read any of it would be another error
    state: dict[str, Any] = {
        "model": {
            "w": torch.full((3, 4), 5, dtype=torch.bfloat16),
            "b": torch.full((4,), 5.0),
            "n": torch.full((2,), 5, dtype=torch.float64),
            "new1": torch.full((2,), 5.0),
            "new2": torch.full((2,), 5.0),
        },
        "step": 1,
        "int_now": torch.full((), 5),
        "tensor_then": 5,
    }
    error = refused(state, reader(path), dcp.StrictLoadPlanner())
    assert {(f.code, f.key) for f in error.findings if f.severity == "error"} == {
        ("keys.shape", "model.w"),
        ("keys.dtype", "model.w"),
        ("keys.shape", "model.b"),
        ("keys.dtype", "model.n"),
        ("keys.missing", "model.new1"),
        ("keys.missing", "model.new2"),
        ("keys.kind", "int_now"),
        ("keys.kind", "tensor_then"),
        ("keys.unexpected", "extra.e"),
    }
    for found in error.findings:
        assert found.message in str(error)
    assert isinstance(state["int_now"], torch.Tensor)
    assert state["tensor_then"] == 5
    assert all((value == 5).all() for value in state["model"].values())


def test_what_fits_is_loaded_to_the_bit(fsdp2_checkpoint: SavedCheckpoint, reader: Reader) -> None:
    expected = fsdp2_checkpoint.expected()
    paths = dcp.read_index(str(fsdp2_checkpoint.path)).paths
    state: dict[str, Any] = {}
    for key, value in expected.items():
        blank = torch.full_like(value, 1) if isinstance(value, torch.Tensor) else None
        torch_checkpoint._nested_dict.set_element(state, paths[key], blank)
    planner = dcp.StrictLoadPlanner()
    load(state, reader(str(fsdp2_checkpoint.path)), planner)
    flat, _ = torch_checkpoint._nested_dict.flatten_state_dict(state)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert same_bits(flat[key], value), key
        else:
            assert flat[key] == value
    assert set(planner.report.loaded) == expected.keys()
    assert planner.report.untouched == planner.report.missing == planner.report.unexpected == []


@pytest.mark.parametrize("golden", LOADABLE, ids=lambda golden: golden.name)
def test_goldens_of_other_writers_load_strictly(golden: Golden) -> None:
    index = dcp.read_index(str(golden.directory))
    expected = expected_tensors(golden)
    state = {
        entry.key: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)).fill_(1)
        for entry in index.tensors
        if entry.key in expected
    }
    others = index.entries.keys() - state.keys()
    planner = dcp.StrictLoadPlanner(skip=sorted(others))
    load(state, dcp.BucketReader(str(golden.directory)), planner)
    assert all(same_bits(state[key], value) for key, value in expected.items())
    assert set(planner.report.loaded) == state.keys()
    assert set(planner.report.skipped) == others


def test_partial_loads_what_is_there_and_names_what_is_not(tmp_path: Path, reader: Reader) -> None:
    path = saved(tmp_path)
    head = torch.full((2, 3), 9.0)
    state = {"model": {"w": torch.zeros(4, 3), "b": torch.zeros(3), "head": head}, "step": 0}
    error = refused(state, reader(path), dcp.PartialLoadPlanner(["head.*"]))
    assert [(f.code, f.key) for f in error.findings] == [("keys.missing", "model.head")]
    planner = dcp.PartialLoadPlanner(["*.head"], skip=["model.b", "extra.*"])
    load(state, reader(path), planner)
    assert same_bits(state["model"]["w"], torch.arange(12.0).reshape(4, 3))
    assert (state["model"]["b"] == 0).all()
    assert (head == 9).all()
    assert state["step"] == 7
    report = planner.report
    assert set(report.loaded) == {"model.w", "step"}
    assert report.missing == ["model.head"]
    assert set(report.unexpected) == {"model.n", "int_now", "tensor_then"}
    assert set(report.skipped) == {"model.b", "extra.e"}
    assert set(report.untouched) == {"model.b", "model.head"}


def test_partial_casts_nothing_in_silence(tmp_path: Path, reader: Reader) -> None:
    state = {"model": {"w": torch.zeros(4, 3, dtype=torch.float16)}}
    [found] = refused(state, reader(saved(tmp_path)), dcp.PartialLoadPlanner()).findings
    assert found.code == "keys.dtype"
    load(state, reader(saved(tmp_path / "2")), dcp.PartialLoadPlanner(transform={"*.w": dcp.cast("float16")}))
    assert same_bits(state["model"]["w"], torch.arange(12.0).reshape(4, 3).half())


def test_all_transforms_on_the_way_in(tmp_path: Path, reader: Reader) -> None:
    torch.manual_seed(0)
    qkv, proj = torch.randn(12, 4), torch.randn(6, 5)
    gate, up, vocabulary = torch.randn(3, 4), torch.randn(5, 4), torch.randn(7, 4)
    source = {"net": {"0.qkv": qkv, "0.proj": proj, "0.gate": gate, "0.up": up, "vocab": vocabulary, "n": 1}}
    path = str(save(source, tmp_path / "step"))
    model = {
        "h.0.q": torch.zeros(8, 4),
        "h.0.k": torch.zeros(2, 4),
        "h.0.v": torch.zeros(2, 4, dtype=torch.float64),
        "h.0.proj": torch.zeros(5, 6, dtype=torch.bfloat16),
        "h.0.up_gate": torch.zeros(8, 4),
        "h.vocab": torch.zeros(9, 4),
        "h.n": 0,
    }
    planner = dcp.StrictLoadPlanner(
        rename={"net": "h"},
        transform={
            "*.qkv": dcp.split(0, ["*.q", "*.k", "*.v"]),
            "*.v": dcp.cast(torch.float64),
            "*.proj": [dcp.transpose(), dcp.cast(torch.bfloat16)],
            "*.up_gate": dcp.join(0, ["*.up", "*.gate"]),
            "h.vocab": dcp.pad(0, 9, value=0.5),
        },
    )
    load(model, reader(path), planner)
    q, k, v = qkv.split([8, 2, 2])
    assert same_bits(model["h.0.q"], q)
    assert same_bits(model["h.0.k"], k)
    assert same_bits(model["h.0.v"], v.double())
    assert same_bits(model["h.0.proj"], proj.T.bfloat16())
    assert same_bits(model["h.0.up_gate"], torch.cat([up, gate]))
    assert same_bits(model["h.vocab"], torch.cat([vocabulary, torch.full((2, 4), 0.5)]))
    assert model["h.n"] == 1
    report = planner.report
    assert set(report.loaded) == model.keys()
    assert report.renamed["h.n"] == "net.n"
    assert report.transformed["h.vocab"] == ["padded dimension 0 from 7 to 9 with 0.5"]
    assert set(report.transformed) == model.keys() - {"h.n"}


def test_a_tensor_may_be_joined_twice_and_kept(tmp_path: Path, reader: Reader) -> None:
    source = {name: torch.full((2, 3), float(number)) for number, name in enumerate("qkv")}
    path = str(save(source, tmp_path / "step"))
    state = {"qkv": torch.zeros(6, 3), "kv": torch.zeros(4, 3), "k": torch.zeros(2, 3)}
    planner = dcp.StrictLoadPlanner(
        transform={"qkv": dcp.join(0, ["q", "k", "v"]), "kv": dcp.join(0, ["k", "v"])}
    )
    load(state, reader(path), planner)
    assert torch.equal(state["qkv"], torch.cat(list(source.values())))
    assert torch.equal(state["kv"], torch.cat([source["k"], source["v"]]))
    assert torch.equal(state["k"], source["k"])


@pytest.mark.parametrize(
    "given", [{"rename": "a=b"}, {"transform": {"a": "bfloat16"}}, {"transform": "bfloat16"}]
)
def test_texts_are_no_rules(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"\{'a': 'b'\}|cast\('bfloat16'\)"):
        dcp.StrictLoadPlanner(**given)


def test_dimensions_in_any_order(tmp_path: Path, reader: Reader) -> None:
    cube = torch.arange(24, dtype=torch.int64).reshape(2, 3, 4)
    path = str(save({"cube": cube}, tmp_path / "step"))
    state = {"cube": torch.zeros(3, 4, 2, dtype=torch.int64)}
    turn = {"cube": [dcp.transpose(0, 1), dcp.transpose(1, -1)]}
    load(state, reader(path), dcp.StrictLoadPlanner(transform=turn))
    assert same_bits(state["cube"], cube.permute(1, 2, 0))


def test_a_collision_and_a_failed_transform_are_told_with_the_rest(tmp_path: Path, reader: Reader) -> None:
    path = str(save({"a.w": torch.ones(2), "b.w": torch.ones(2), "c": torch.ones(3)}, tmp_path / "step"))
    planner = dcp.StrictLoadPlanner(rename={"a": "b"}, transform={"c": dcp.transpose()})
    error = refused({"b.w": torch.zeros(2), "c": torch.zeros(3), "d": 1}, reader(path), planner)
    assert [(f.code, f.key) for f in error.findings] == [
        ("keys.renamed", "b.w"),
        ("keys.missing", "d"),
        ("keys.shape", "c"),
    ]
    assert "a.w and b.w would both be named b.w" in str(error)


def test_what_transforms_make_is_told_as_that(tmp_path: Path, reader: Reader) -> None:
    path = str(save({"qkv": torch.ones(6), "e": torch.ones(2)}, tmp_path / "step"))
    split = dcp.split(0, ["a", "b"], sizes=[2, 4])
    error = refused(
        {"a": torch.zeros(2), "e": torch.zeros(2)},
        reader(path),
        dcp.StrictLoadPlanner(transform={"qkv": split}),
    )
    assert (
        "1 problem:\n  keys.unexpected: b, which transform makes of qkv, is not in the state dict: "
        in str(error)
    )
    assert "skip=['b']" in str(error)
    casts = {"e": dcp.cast("float16"), "*": dcp.cast("bfloat16")}
    planner = dcp.PartialLoadPlanner(transform=casts)
    error = refused({"e": torch.zeros(2, dtype=torch.float16)}, reader(path), planner)
    assert "cast to that last: the rules that it meets are applied in turn" in str(error)
    assert "says so" not in str(error)


def test_rules_that_meet_nothing_warn(tmp_path: Path, reader: Reader) -> None:
    path = str(save({"w": torch.ones(2)}, tmp_path / "step"))
    planner = dcp.StrictLoadPlanner(rename={"x": "y"}, transform={"z.*": dcp.cast("int8")})
    state = {"w": torch.zeros(2)}
    with pytest.warns(UserWarning, match="matches no") as caught:
        load(state, reader(path), planner)
    assert [str(w.message) for w in caught if "matches no" in str(w.message)] == [
        "rename rule 'x' -> 'y' matches no key of the checkpoint",
        "transform 'z.*' matches no tensor",
    ]
    assert (state["w"] == 1).all()


def test_objects_go_where_the_state_has_them(tmp_path: Path, reader: Reader) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    source: dict[str, Any] = {
        "seen": {0: 10, 1: [20, 21]},
        "schedule": schedule.state_dict(),
        "list": [{3: {"n": 4}}, {None: torch.ones(2)}],
    }
    path = str(save(source, tmp_path / "step"))
    state: dict[str, Any] = {
        "seen": {0: 0, 1: [0, 0]},
        "schedule": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5]).state_dict(),
        "list": [{3: {"n": 0}}, {None: torch.zeros(2)}],
    }
    load(state, reader(path), dcp.StrictLoadPlanner())
    assert state["seen"] == source["seen"]
    assert dict(state["schedule"]["milestones"]) == {2: 1, 5: 1}
    assert state["list"][0] == {3: {"n": 4}}
    assert list(state["list"][1]) == [None]
    save(state, tmp_path / "again", planner=dcp.CheckedSavePlanner())


def test_names_that_are_the_same_as_text_are_both_shown() -> None:
    planner = dcp.StrictLoadPlanner()
    with pytest.raises(UsageError, match=re.escape("state['seen'][0] and state['seen']['0'] of the state")):
        planner.set_up_planner({"seen": {0: 1, "0": 2}}, None, True)
    with pytest.raises(UsageError, match=re.escape("state[0] and state['0'] of the state")):
        dcp.StrictLoadPlanner(flatten_state_dict=False).set_up_planner({0: 1, "0": 2}, None, True)  # type: ignore[dict-item]
    with pytest.raises(UsageError, match=re.escape("state['a']['b'] and state['a.b'] of the state")):
        planner.set_up_planner({"a": {"b": 1}, "a.b": 2}, None, True)
    with pytest.raises(UsageError, match=re.escape("state['seen'][0] and state['seen']['0'] of the state")):
        dcp.CheckedSavePlanner().set_up_planner({"seen": {0: 1, "0": 2}})


def test_objects_are_loaded_unflattened_too(tmp_path: Path, reader: Reader) -> None:
    source = {"w": torch.ones(2), "nested": {"n": 1, "t": torch.ones(1)}, "n": 5}
    planner = torch_checkpoint.DefaultSavePlanner(flatten_state_dict=False)
    path = str(save(source, tmp_path / "step", planner=planner))
    state: dict[str, Any] = {"w": torch.zeros(2), "nested": {"n": 0}, "n": 0}
    strict = dcp.StrictLoadPlanner(flatten_state_dict=False)
    load(state, reader(path), strict)
    assert (state["n"], state["nested"]["n"]) == (5, 1)
    assert state["w"].all()
    assert state["nested"]["t"].all()
    assert sorted(strict.report.loaded) == ["n", "nested", "w"]


def test_tensors_without_memory_are_named(tmp_path: Path) -> None:
    path = str(save({"w": torch.ones(2)}, tmp_path / "step"))
    with pytest.raises(CheckpointException, match=r"w is on the meta device.*to_empty"):
        load({"w": torch.empty(2, device="meta")}, dcp.BucketReader(path), dcp.StrictLoadPlanner())


def test_patterns_that_meet_nothing_warn(tmp_path: Path, reader: Reader) -> None:
    path = str(save({"w": torch.ones(2)}, tmp_path / "step"))
    planner = dcp.PartialLoadPlanner(["head.*", "w"], skip=["optim.*"], per_rank=["rng"])
    with pytest.warns(UserWarning, match="matches no") as caught:
        load({"w": torch.zeros(2)}, reader(path), planner)
    assert [str(w.message) for w in caught if "matches no" in str(w.message)] == [
        "skip pattern 'optim.*' matches no key",
        "per_rank pattern 'rng' matches no key",
        "allow_missing pattern 'head.*' matches no key",
    ]


def test_values_of_every_rank_are_told_of_in_order_and_can_be_renamed(tmp_path: Path, reader: Reader) -> None:
    own = {f"rng/rank_{rank}": rank for rank in (10, 2, 0, 1, *range(3, 10))}
    path = str(save(own, tmp_path / "step"))
    error = refused({"rng": 0}, reader(path), dcp.StrictLoadPlanner())
    assert "load it with per_rank=['rng']" in str(error)
    assert "rename" not in str(error)
    keys = [found.key for found in error.findings if found.code == "keys.unexpected"]
    assert keys == [f"rng/rank_{rank}" for rank in range(11)]
    state: dict[str, Any] = {"st": {"rng": -1}}
    planner = dcp.PartialLoadPlanner(rename={"rng": "st.rng"}, per_rank=["st.rng"])
    load(state, reader(path), planner)
    assert state == {"st": {"rng": 0}}
    assert planner.report.loaded == ["st.rng/rank_0"]


def test_names_that_only_changed_are_recognised(tmp_path: Path, reader: Reader) -> None:
    source = {f"module.l{n}.w": torch.ones(n + 1) for n in range(4)}
    path = str(save(source, tmp_path / "step"))
    state = {f"l{n}.w": torch.zeros(n + 1) for n in range(4)}
    error = refused(state, reader(path), dcp.StrictLoadPlanner())
    [hint] = [found for found in error.findings if found.code == "keys.renamed"]
    assert (hint.severity, len(hint.detail["renames"])) == ("info", 4)
    assert "rename=" in hint.message
    load(state, reader(path), dcp.StrictLoadPlanner(rename={"module": ""}))
    assert all((value == 1).all() for value in state.values())


def test_spelling_of_torch_2_3(tmp_path: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint import _version

    state = {"optim": {"groups": [{"lr": 0.1, "betas": [0.9, 0.99]}], "w": torch.ones(2)}}
    with monkeypatch.context() as old:
        old.setattr(_version, "_derived_version", "2_3")
        path = str(save(state, tmp_path / "step"))
    assert "optim.groups" in dcp.read_index(path).entries
    fresh: dict[str, Any] = {"optim": {"groups": [{"lr": 0, "betas": [0, 0]}], "w": torch.zeros(2)}}
    load(fresh, reader(path), dcp.StrictLoadPlanner())
    assert fresh["optim"]["groups"] == state["optim"]["groups"]
    assert (fresh["optim"]["w"] == 1).all()
    assert _version._derived_version is None


def test_a_gap_in_the_index_is_not_left_as_it_was(tmp_path: Path) -> None:
    path = Path(saved(tmp_path))
    metadata = torch_checkpoint.FileSystemReader(path).read_metadata()
    [chunk] = metadata.state_dict_metadata["model.w"].chunks
    chunk.sizes = torch.Size((2, 3))
    planner = dcp.PartialLoadPlanner()
    planner.set_up_planner({"model": {"w": torch.zeros(4, 3)}}, metadata, True)
    with pytest.raises(StateMismatchError, match=r"no chunk of the checkpoint holds \[2:4, 0:3\]"):
        planner.create_global_plan([planner.create_local_plan()])


def test_findings_are_not_lost_with_a_reader_that_makes_plans_of_its_own(tmp_path: Path) -> None:
    metadata = dcp.BucketReader(saved(tmp_path)).read_metadata()
    planner = dcp.StrictLoadPlanner()
    planner.set_up_planner({}, metadata, True)
    planner.create_local_plan()
    with pytest.raises(StateMismatchError):
        planner.finish_plan(torch_checkpoint.planner.LoadPlan([]))


def test_what_is_no_list_of_patterns() -> None:
    with pytest.raises(UsageError, match=r"\['head\.\*'\]"):
        dcp.PartialLoadPlanner("head.*")


@pytest.mark.parametrize("damage", ["cut", "gone", "newer", "no-metadata"])
def test_a_torn_checkpoint_is_refused(tmp_path: Path, damage: str) -> None:
    path = Path(saved(tmp_path))
    [data] = path.glob("*.distcp")
    index = path / ".metadata"
    if damage == "cut":
        os.truncate(data, data.stat().st_size // 2)
    elif damage == "gone":
        data.unlink()
    elif damage == "newer":
        os.utime(index, (1_000_000_000, 1_000_000_000))
    else:
        index.unlink()
    words = {
        "cut": "cut off",
        "gone": "does not exist",
        "newer": "copied=True",
        "no-metadata": r"no \.metadata",
    }
    state = {"model": {"w": torch.zeros(4, 3)}}
    with pytest.raises(CheckpointException, match=words[damage]):
        load(state, dcp.BucketReader(str(path)), dcp.PartialLoadPlanner())
    assert (state["model"]["w"] == 0).all()
    if damage == "newer":
        load(state, dcp.BucketReader(str(path), copied=True), dcp.PartialLoadPlanner())
        assert state["model"]["w"][3, 2] == 11
