"""`CheckedSavePlanner` on real ranks: what they do not agree on is told, split or refused in time."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

import dcp
from dcp.errors import CheckpointError, UsageError
from dcp.save import BucketWriter, CheckedSavePlanner
from dcp.save.files import size_of
from dcp.save.shared import dedup
from tests.dcp.load.expectations import same_bits
from tests.dcp.save.saving import awkward_state, blank, load, save
from tests.support.ranks import RankError, run_ranks


def _state(rank: int, differing: bool) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    own = rank if differing else 0
    strings = {"a": "x" * 50, "b": {f"s{n}" for n in range(20)}}
    # The same meaning, from other objects in another order.
    text = "".join(["shared", "-", "text"])
    pair = [text, text] if rank else ["shared-text", "shared" + "-text"]
    return {
        "model": {
            "sharded": distribute_tensor(torch.arange(40.0).reshape(10, 4), mesh, [Shard(0)]),
            "replicated": distribute_tensor(torch.ones(4), mesh, [Replicate()]),
            "plain": torch.arange(1000).reshape(10, 100),
        },
        "rng": torch.full((100,), own, dtype=torch.uint8),
        "loader": {"position": own * 10, "epoch": 3},
        "config": {"z": 1, "a": 2} if rank else {"a": 2, "z": 1},
        "strings": strings,
        "pair": pair,
        "list": [torch.tensor(own), torch.tensor(7)],
    }


def _save(place: str, differing: bool, options: dict[str, Any]) -> list[str]:
    state, planner = _state(torch.distributed.get_rank(), differing), CheckedSavePlanner(**options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch_checkpoint.save(state, storage_writer=BucketWriter(place), planner=planner)
    assert not SavePlanner._cached_save_plan
    assert not SavePlanner._cached_all_plans
    return [str(warning.message) for warning in caught if "only one rank" in str(warning.message)]


def keys(place: str) -> set[str]:
    return set(dcp.read_index(place).entries)


def test_ranks_that_agree_save_as_with_torchs_planner(tmp_path: Path) -> None:
    place = str(tmp_path / "step")
    assert run_ranks(_save, 3, place, False, {}) == [[], [], []]
    assert dcp.validate(place, scrub=True).ok
    state = {
        "model": {"sharded": torch.zeros(10, 4)},
        "rng": torch.ones(100, dtype=torch.uint8),
        "pair": None,
    }
    load(state, place)
    assert same_bits(state["model"]["sharded"], torch.arange(40.0).reshape(10, 4))
    assert state["pair"] == ["shared-text", "shared-text"]


def test_a_divergence_is_an_error_that_names_keys_and_ranks(tmp_path: Path) -> None:
    place = tmp_path / "step"
    with pytest.raises(RankError) as caught:
        run_ranks(_save, 3, str(place), True, {})
    said = str(caught.value)
    assert "rng differs between rank 0 and rank 1 and rank 2" in said
    assert "loader.position differs" in said
    assert "list.0 differs" in said
    for same in ("model", "config", "strings", "pair", "epoch", "list.1"):
        assert f"{same} differs" not in said
        assert f"{same}.plain differs" not in said
    assert not place.exists()


def test_a_divergence_can_be_split(tmp_path: Path) -> None:
    place = str(tmp_path / "step")
    run_ranks(_save, 3, place, True, {"on_divergence": "split"})
    found = keys(place)
    assert {"rng/rank_0", "rng/rank_1", "rng/rank_2", "loader.position/rank_2", "list.0/rank_1"} <= found
    assert not {"rng", "loader.position", "list.0"} & found
    assert {"loader.epoch", "list.1", "model.plain", "config.a"} <= found
    assert dcp.validate(place, scrub=True).ok
    state: dict[str, Any] = {
        "rng/rank_2": torch.zeros(100, dtype=torch.uint8),
        "loader": {"position/rank_1": 0, "position/rank_2": 0},
        "list.0/rank_1": torch.tensor(0),
    }
    load(state, place)
    assert state["rng/rank_2"].eq(2).all()
    assert state["loader"] == {"position/rank_1": 10, "position/rank_2": 20}
    assert state["list.0/rank_1"] == 1


def test_a_divergence_can_be_warned_of(tmp_path: Path) -> None:
    place = str(tmp_path / "step")
    told = run_ranks(_save, 2, place, True, {"on_divergence": "warn"})
    assert "rng differs between rank 0 and rank 1" in told[0][0]
    assert {"rng", "loader.position"} <= keys(place)


def test_patterns_split_also_what_is_the_same(tmp_path: Path) -> None:
    place = str(tmp_path / "step")
    run_ranks(_save, 2, place, False, {"per_rank": ["rng", "loader.*", "model.sharded"]})
    assert {"rng/rank_0", "rng/rank_1", "loader.epoch/rank_1", "model.sharded", "config.a"} <= keys(place)


def _resume(place: str, planner_options: dict[str, Any]) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    state: dict[str, Any] = _state(rank, differing=False)
    state["rng"] = torch.full((100,), 99, dtype=torch.uint8)
    state["loader"]["position"] = None
    state["list"][0] = torch.tensor(99)
    planner = dcp.StrictLoadPlanner(**planner_options)
    torch_checkpoint.load(state, storage_reader=dcp.BucketReader(place), planner=planner)
    return {"rng": state["rng"], "position": state["loader"]["position"], "list": state["list"][0]}


OWN = ["rng", "loader.position", "list.0"]


@pytest.mark.parametrize("how", [{"per_rank": OWN}, {"on_divergence": "split"}])
def test_every_rank_resumes_from_its_own_values(tmp_path: Path, how: dict[str, Any]) -> None:
    place = str(tmp_path / "step")
    run_ranks(_save, 3, place, True, how)
    for rank, loaded in enumerate(run_ranks(_resume, 3, place, {"per_rank": OWN})):
        assert loaded["rng"].tolist() == [rank] * 100
        assert (loaded["position"], loaded["list"]) == (rank * 10, rank)
    with pytest.raises(RankError) as caught:
        run_ranks(_resume, 2, place, {"per_rank": OWN})
    assert "rng was saved by 3 ranks, each its own, as rng/rank_0 to rng/rank_2, and 2 ranks load" in str(
        caught.value
    )
    with pytest.raises(RankError, match=r"rng was saved by 3 ranks, each its own.*and 4 ranks load"):
        run_ranks(_resume, 4, place, {"per_rank": OWN})
    skipped = run_ranks(_resume, 2, place, {"per_rank": OWN, "skip": [f"{key}/rank_*" for key in OWN]})
    assert [loaded["position"] for loaded in skipped] == [None, None]
    with pytest.raises(RankError, match="rng is not in the checkpoint"):
        run_ranks(_resume, 3, place, {})


def test_a_pattern_that_meets_a_dict_means_all_that_is_in_it(tmp_path: Path) -> None:
    place, options = str(tmp_path / "step"), {"per_rank": ["rng", "loader", "list"]}
    run_ranks(_save, 2, place, True, options)
    assert {"loader.position/rank_0", "loader.epoch/rank_1", "list.1/rank_0", "config.a"} <= keys(place)
    for rank, loaded in enumerate(run_ranks(_resume, 2, place, options)):
        assert (loaded["position"], loaded["list"]) == (rank * 10, rank)


def _drifted_in_one_element(place: str) -> None:
    weight = torch.zeros(1 << 22)
    weight[1_234_567] = torch.distributed.get_rank()
    torch_checkpoint.save(
        {"weight": weight}, storage_writer=BucketWriter(place), planner=CheckedSavePlanner()
    )


def test_one_element_of_a_large_replica_that_drifted_is_found(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="weight differs between rank 0 and rank 1"):
        run_ranks(_drifted_in_one_element, 2, str(tmp_path / "step"))


def _group_resumes(place: str) -> tuple[int, str]:
    """Ranks 1 and 2 of 3 save and load as a group of their own; then ranks 0 and 1 try to load that."""
    rank = torch.distributed.get_rank()
    writers, others = torch.distributed.new_group([1, 2]), torch.distributed.new_group([0, 1])
    got, why = -1, ""
    if rank in (1, 2):
        planner = CheckedSavePlanner(per_rank=["position"])
        state = {"position": rank * 100, "step": 7}
        writer = dcp.BucketWriter(place)
        torch_checkpoint.save(state, storage_writer=writer, planner=planner, process_group=writers)
        state = {"position": -1, "step": 0}
        strict = dcp.StrictLoadPlanner(per_rank=["position"])
        reader = dcp.BucketReader(place)
        torch_checkpoint.load(state, storage_reader=reader, planner=strict, process_group=writers)
        got = state["position"]
    torch.distributed.barrier()
    if rank in (0, 1):
        strict = dcp.StrictLoadPlanner(per_rank=["position"])
        try:
            torch_checkpoint.load(
                {"position": -1, "step": 0},
                storage_reader=dcp.BucketReader(place),
                planner=strict,
                process_group=others,
            )
        except CheckpointException as error:
            why = str(error.failures[0][0])
    return got, why


def test_ranks_of_a_group_get_their_own_values_or_are_refused(tmp_path: Path) -> None:
    place = str(tmp_path / "step")
    results = run_ranks(_group_resumes, 3, place)
    assert [got for got, _ in results] == [-1, 100, 200]
    assert keys(place) == {"position/rank_1", "position/rank_2", "step"}
    for _, why in results[:2]:
        assert "position was saved by ranks 1, 2" in why
        assert "and 2 ranks load" in why


def _save_replicas(place: str, kind: str, drifted: bool, options: dict[str, Any]) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    local = torch.arange(4.0).reshape(1, 4) if kind == "replicated" else torch.full((3, 4), float(rank % 2))
    if drifted and rank == 3:
        local[0, 2] += 1
    placements = [Replicate(), Replicate() if kind == "replicated" else Shard(0)]
    if kind == "submesh":
        value = DTensor.from_local(local, mesh["shard"], [Shard(0)], run_check=False)
    else:
        value = DTensor.from_local(local, mesh, placements, run_check=False)
    planner = CheckedSavePlanner(**options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch_checkpoint.save({"w": value}, storage_writer=BucketWriter(place), planner=planner)
    return [str(warning.message) for warning in caught if "only one rank" in str(warning.message)]


@pytest.mark.parametrize("kind", ["replicated", "hsdp", "submesh"])
def test_replicas_that_drifted_apart_are_found(tmp_path: Path, kind: str) -> None:
    run_ranks(_save_replicas, 4, str(tmp_path / "same"), kind, False, {})
    said = r"w differs between ranks 0, 1, 2 and rank 3"
    if kind != "replicated":
        said = r"w\[3:6, 0:4\] differs between rank 1 and rank 3\. Replicas of a shard have drifted apart"
    with pytest.raises(RankError, match=said):
        run_ranks(_save_replicas, 4, str(tmp_path / "error"), kind, True, {})
    assert not (tmp_path / "error").exists()
    [told] = run_ranks(_save_replicas, 4, str(tmp_path / "warn"), kind, True, {"on_divergence": "warn"})[0]
    assert "w" in told
    assert keys(str(tmp_path / "warn")) == {"w"}


def test_whole_replicas_can_be_split_and_shards_cannot(tmp_path: Path) -> None:
    split = {"on_divergence": "split"}
    run_ranks(_save_replicas, 4, str(tmp_path / "step"), "replicated", True, split)
    assert keys(str(tmp_path / "step")) == {f"w/rank_{rank}" for rank in range(4)}
    state = load({f"w/rank_{rank}": torch.zeros(1, 4) for rank in range(4)}, str(tmp_path / "step"))
    assert [state[f"w/rank_{rank}"][0, 2].item() for rank in range(4)] == [2, 2, 2, 3]
    with pytest.raises(RankError, match="Replicas of a shard have drifted apart"):
        run_ranks(_save_replicas, 4, str(tmp_path / "shards"), "hsdp", True, split)


def _hashed(limit: int) -> list[str]:
    """Keys that are hashed on this rank, of a state in which only ``norm`` is replicated."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    state = {
        "sharded": distribute_tensor(torch.ones(1000), mesh, [Shard(0)]),
        "norm": distribute_tensor(torch.ones(10), mesh, [Replicate()]),
    }
    planner = CheckedSavePlanner(digest_limit=limit)
    planner.set_up_planner(state, None, True)
    told = planner.create_local_plan().planner_data
    return [index.fqn for index in told.digests]


def test_what_only_one_rank_can_hold_is_not_hashed() -> None:
    assert run_ranks(_hashed, 2, 100) == [["norm"], ["norm"]]


def _files_of(place: str, lowest: bool) -> set[str]:
    state = {f"w{n}": torch.ones(100) for n in range(4)}
    planner = CheckedSavePlanner(dedup_save_to_lowest_rank=lowest)
    torch_checkpoint.save(state, storage_writer=BucketWriter(place), planner=planner)
    return {c.record.path for e in dcp.read_index(place).tensors for c in e.chunks if c.record}


@pytest.mark.parametrize("lowest", [True, False])
def test_what_several_hold_is_dealt_out_or_left_to_the_lowest(tmp_path: Path, lowest: bool) -> None:
    files = run_ranks(_files_of, 2, str(tmp_path / "step"), lowest)[0]
    assert {file.split("_")[2] for file in files} == ({"0"} if lowest else {"0", "1"})


def _save_other_shapes(place: str, mode: str) -> None:
    rank = torch.distributed.get_rank()
    state = {"t": torch.ones(2 + rank), "kind": torch.ones(1) if rank else "text"}
    planner = CheckedSavePlanner(on_divergence=mode)
    torch_checkpoint.save(state, storage_writer=BucketWriter(place), planner=planner)


def test_other_shapes_and_kinds_are_divergences_too(tmp_path: Path) -> None:
    with pytest.raises(
        RankError, match=r"t is a tensor of shape \[2\] and float32 on rank 0 and a .*per_rank=\['t'\]"
    ):
        run_ranks(_save_other_shapes, 2, str(tmp_path / "warn"), "warn")
    run_ranks(_save_other_shapes, 2, str(tmp_path / "step"), "split")
    assert keys(str(tmp_path / "step")) == {"t/rank_0", "t/rank_1", "kind/rank_0", "kind/rank_1"}


def _save_nested_otherwise(place: str) -> None:
    state = {"a": {"b": 1}} if torch.distributed.get_rank() else {"a.b": 1}
    torch_checkpoint.save(state, storage_writer=BucketWriter(place), planner=CheckedSavePlanner())


def test_a_key_has_one_place_on_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(
        RankError, match=r"a\.b is state\['a\.b'\] on rank 0 and state\['a'\]\['b'\] on rank 1"
    ):
        run_ranks(_save_nested_otherwise, 2, str(tmp_path / "step"))


def test_two_places_with_one_key_are_both_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"state\['a'\]\['b'\] and state\['a\.b'\]") as caught:
        save({"a": {"b": 1}, "a.b": 2}, BucketWriter(str(tmp_path / "s")), planner=CheckedSavePlanner())
    assert isinstance(caught.value.failures[0][0], UsageError)


def test_a_rank_key_that_is_taken_is_refused(tmp_path: Path) -> None:
    planner = CheckedSavePlanner(per_rank=["rng"])
    with pytest.raises(CheckpointException, match="rng/rank_0, which is a key of its own"):
        save({"rng": 1, "rng/rank_0": 2}, BucketWriter(str(tmp_path / "s")), planner=planner)


def test_patterns_mean_the_same_to_both_planners(tmp_path: Path) -> None:
    place, own = str(tmp_path / "s"), ["rng[0]", "p?s*"]
    save(
        {"rng[0]": 1, "rng0": 2, "position": 3}, BucketWriter(place), planner=CheckedSavePlanner(per_rank=own)
    )
    assert keys(place) == {"rng[0]/rank_0", "rng0", "position/rank_0"}
    held = {"rng[0]": 0, "rng0": 0, "position": 0}
    strict = dcp.StrictLoadPlanner(per_rank=own)
    torch_checkpoint.load(held, storage_reader=dcp.BucketReader(place), planner=strict, no_dist=True)
    assert held == {"rng[0]": 1, "rng0": 2, "position": 3}


def _save_pieces(place: str, rows: list[tuple[int, int]]) -> None:
    state = {"w": SavedPiece(*rows[torch.distributed.get_rank()])}
    torch_checkpoint.save(state, storage_writer=BucketWriter(place), planner=CheckedSavePlanner())


class SavedPiece:
    """Rows of a tensor of ten rows, as a save planner asks for them."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.local = first, torch.ones(last - first, 3)

    def __create_write_items__(self, key: str, _: object) -> list[Any]:
        offsets = torch.Size([self.first, 0])
        chunk = ChunkStorageMetadata(offsets, self.local.size())
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(self.local), torch.Size([10, 3]))
        return [WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data)]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([(0, 6), (5, 10)], r"w: \[0:6, 0:3\] of rank 0 and \[5:10, 0:3\] of rank 1 both hold \[5:6, 0:3\]"),
        ([(0, 4), (5, 10)], r"w: no rank of 2 holds \[4:5, 0:3\]"),
        ([(0, 5), (5, 11)], r"w: \[5:11, 0:3\] of rank 1 lies outside"),
    ],
)
def test_shards_that_do_not_tile_are_refused_with_both_sides(
    tmp_path: Path, rows: list[tuple[int, int]], said: str
) -> None:
    with pytest.raises(RankError, match=said):
        run_ranks(_save_pieces, 2, str(tmp_path / "step"), rows)
    assert not (tmp_path / "step").exists()


def test_a_hole_is_refused_also_where_one_process_saves(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"w: nothing holds \[6:10, 0:3\]"):
        save({"w": SavedPiece(0, 6)}, BucketWriter(str(tmp_path / "s")), planner=CheckedSavePlanner())


class SavedTwice(SavedPiece):
    """The same rows two times."""

    def __create_write_items__(self, key: str, value: object) -> list[Any]:
        return super().__create_write_items__(key, value) * 2


def test_what_one_rank_would_write_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"w: rank 0 would write \[0:10, 0:3\] twice"):
        save({"w": SavedTwice(0, 10)}, BucketWriter(str(tmp_path / "s")), planner=CheckedSavePlanner())


def _plan_of(sizes: dict[str, int], first: int = 0) -> SavePlan:
    """Every key a shard of so many bytes, which begins at ``first``, of a tensor of a million."""
    items = []
    for key, size in sizes.items():
        chunk = ChunkStorageMetadata(torch.Size([first]), torch.Size([size]))
        data = TensorWriteData(chunk, TensorProperties(dtype=torch.uint8), torch.Size([1_000_000]))
        items.append(WriteItem(MetadataIndex(key, [first]), WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items)


@given(
    shared=st.lists(st.integers(0, 1000), max_size=30),
    own=st.lists(st.integers(0, 1000), min_size=1, max_size=6),
)
def test_what_several_hold_is_dealt_out_evenly_and_each_once(shared: list[int], own: list[int]) -> None:
    both = {f"s{number}": size for number, size in enumerate(shared)}
    plans = [
        SavePlan(_plan_of(both).items + _plan_of({"own": size}, first=rank).items)
        for rank, size in enumerate(own)
    ]
    loads = [sum(map(size_of, plan.items)) for plan in dedup(plans, to_lowest_rank=False)]
    assert sum(loads) == sum(shared) + sum(own)
    largest = max([*shared, 0])
    for load_, size in zip(loads, own, strict=True):
        # Who writes more than its own does not write more than the others by more than one item.
        assert load_ == size or load_ - min(loads) <= largest + len(shared)
    lowest = dedup(plans, to_lowest_rank=True)
    assert [len(plan.items) for plan in lowest] == [len(shared) + 1, *[1] * (len(own) - 1)]


def _several_checkpointers(place: str) -> None:
    rank = torch.distributed.get_rank()
    planners = [CheckedSavePlanner(), CheckedSavePlanner()]
    for step in range(3):
        stock = DefaultSavePlanner(enable_plan_caching=True)
        writer = BucketWriter(f"{place}/stock_{step}")
        torch_checkpoint.save({"other": torch.ones(3)}, storage_writer=writer, planner=stock)
        for number, planner in enumerate(planners):
            # Other keys and other shapes in every save.
            state = {"w": torch.full((2 + step,), float(number)), f"step_{step}": step}
            writer = BucketWriter(f"{place}/{number}_{step}")
            if number:
                torch_checkpoint.save(state, storage_writer=writer, planner=planner)
            else:
                torch_checkpoint.async_save(state, storage_writer=writer, planner=planner).result()
    cached = {name for name, held in vars(SavePlanner).items() if name.startswith("_cached") and held}
    assert cached == (
        {"_cached_save_plan", "_cached_final_save_plan"} | (_COORDINATORS if not rank else set())
    )
    assert all(list(vars(SavePlanner)[name]) == ["DefaultSavePlanner"] for name in cached)


_COORDINATORS = {"_cached_all_plans", "_cached_global_plan", "_cached_metadata"}


def test_plans_do_not_leak_between_checkpointers(tmp_path: Path) -> None:
    run_ranks(_several_checkpointers, 2, str(tmp_path))
    for step in range(3):
        for number in range(2):
            place = str(tmp_path / f"{number}_{step}")
            assert keys(place) == {"w", f"step_{step}"}
            assert load({"w": torch.zeros(2 + step)}, place)["w"].eq(number).all()
            assert dcp.validate(place, scrub=True).ok
    with pytest.raises(TypeError, match="enable_plan_caching"):
        CheckedSavePlanner(enable_plan_caching=True)  # type: ignore[call-arg]


def test_awkward_states_are_saved_as_with_torchs_planner(tmp_path: Path) -> None:
    state = awkward_state()
    save(state, BucketWriter(str(tmp_path / "ours")), planner=CheckedSavePlanner())
    save(state, BucketWriter(str(tmp_path / "theirs")))
    data = [[f.read_bytes() for f in (tmp_path / name).glob("__0_*.distcp")] for name in ("ours", "theirs")]
    assert len(data[0]) == 1
    assert data[0] == data[1]
    load(blank(state), str(tmp_path / "ours"))


def test_wrong_usage() -> None:
    for options in ({"on_divergence": "ignore"}, {"per_rank": "rng"}, {"digest_limit": 0}):
        with pytest.raises(UsageError):
            CheckedSavePlanner(**options)  # type: ignore[arg-type]


def test_the_error_says_what_to_do() -> None:
    from dcp.save.shared import Divergence

    planner = CheckedSavePlanner()
    with pytest.raises(CheckpointError, match=r"per_rank=\['k0', 'k1', .*'k9'\] or") as caught:
        planner._tell([Divergence(f"k{n}", ((0,), (1, 2)), ("an object",) * 2) for n in range(12)])
    assert "and 2 more. " in str(caught.value)
    assert caught.value.code == "ranks.shared-value"
