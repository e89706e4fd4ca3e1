"""`BucketWriter` under torch's own `save`: torch's format on every store, committed whole or not at all."""

import os
import pickle
import random
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

import dcp
from dcp.errors import AlreadyExistsError, UsageError
from dcp.save import BucketWriter
from dcp.save.files import LEAST, split
from dcp.storage import open_store
from tests.dcp.load.expectations import same_bits
from tests.dcp.save.killing import kill_a_save
from tests.dcp.save.saving import assert_same, awkward_state, blank, load, names, save
from tests.support.ranks import RankError, run_ranks


def assert_whole(place: str) -> None:
    report = dcp.validate(place, scrub=True)
    assert report.ok, report.findings
    assert report.state == "committed"


def test_what_is_saved_loads_and_is_whole_to_the_last_byte(place: str) -> None:
    state = awkward_state()
    save(state, BucketWriter(place))
    assert_same(load(blank(state), place), state)
    assert names(place) == [".metadata", "__0_0.distcp"]
    assert_whole(place)


def test_data_and_index_are_those_of_upstream(tmp_path: Path) -> None:
    state = awkward_state()
    save(state, BucketWriter(str(tmp_path / "ours")))
    with warnings.catch_warnings(action="ignore"):
        torch_checkpoint.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    [data] = ours.glob("__0_*.distcp")
    assert data.read_bytes() == (theirs / "__0_0.distcp").read_bytes()
    a, b = (pickle.loads((path / ".metadata").read_bytes()) for path in (ours, theirs))
    for stored in b.storage_data.values():
        stored.relative_path = data.name
    assert (a.storage_data, a.state_dict_metadata, a.planner_data, a.version) == (
        b.storage_data,
        b.state_dict_metadata,
        b.planner_data,
        b.version,
    )


def test_a_committed_step_is_not_replaced_unless_told(place: str) -> None:
    save({"w": torch.ones(3), "old": 1}, BucketWriter(place))
    before = dcp.validate(place).fingerprint
    with pytest.raises(CheckpointException, match="overwrite=True") as caught:
        save({"w": torch.zeros(3)}, BucketWriter(place))
    assert isinstance(caught.value.failures[0][0], AlreadyExistsError)
    assert dcp.validate(place).fingerprint == before
    store = open_store(place)
    store.replace("__7_0.distcp", b"of a rank that is no more")
    save({"w": torch.zeros(3)}, BucketWriter(place, overwrite=True))
    assert names(place) == [".metadata", "__0_0.distcp"]
    assert same_bits(load({"w": torch.ones(3)}, place)["w"], torch.zeros(3))
    assert_whole(place)


class FailingPlanner(DefaultSavePlanner):
    """Cannot give the data of one key."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn == "bad":
            raise RuntimeError("the data of this key is gone")
        return super().resolve_data(write_item)


def test_a_failed_save_commits_nothing_and_can_be_repeated(place: str) -> None:
    state = {"bad": torch.ones(5), "w": torch.arange(4)}
    with pytest.raises(CheckpointException, match="is gone"):
        save(state, BucketWriter(place), planner=FailingPlanner())
    assert not open_store(place).exists(".metadata")
    open_store(place).replace("__0_0.distcp", b"of an earlier attempt")
    save(state, BucketWriter(place))
    assert names(place) == [".metadata", "__0_0.distcp"]
    assert same_bits(load({"w": torch.zeros_like(state["w"])}, place)["w"], state["w"])
    assert_whole(place)


def test_a_failed_replacement_leaves_no_torn_step_that_looks_committed(place: str) -> None:
    save({"w": torch.ones(3)}, BucketWriter(place))
    with pytest.raises(CheckpointException, match="is gone"):
        save({"bad": torch.ones(5)}, BucketWriter(place, overwrite=True), planner=FailingPlanner())
    try:
        left = names(place)
    except FileNotFoundError:
        left = []
    assert ".metadata" not in left


class Meanwhile(DefaultSavePlanner):
    """Does something while its first item is written."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.act: Callable[[], object] | None = act

    def resolve_data(self, write_item: WriteItem) -> Any:
        act, self.act = self.act, None
        if act is not None:
            act()
        return super().resolve_data(write_item)


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_saves_into_one_place_one_commits_and_keeps_its_data(place: str, overwrite: bool) -> None:
    if overwrite:
        save({"w": torch.full((3,), 7.0)}, BucketWriter(place))

    def other() -> None:
        save({"w": torch.zeros(3)}, BucketWriter(place, overwrite))

    with pytest.raises(CheckpointException, match="another save"):
        save({"w": torch.ones(3)}, BucketWriter(place, overwrite), planner=Meanwhile(other))
    assert same_bits(load({"w": torch.ones(3)}, place)["w"], torch.zeros(3))
    assert names(place) == [".metadata", "__0_0.distcp"]
    assert_whole(place)


def test_a_save_whose_data_was_removed_is_not_committed(place: str) -> None:
    writer = BucketWriter(place)
    finish = writer.finish

    def finish_late(**results: Any) -> None:
        # A step of another job is committed, and replaced, while this one has written its data.
        save({"w": torch.zeros(3)}, BucketWriter(place))
        open_store(place).remove(".metadata")
        finish(**results)

    writer.finish = finish_late  # type: ignore[method-assign]
    with pytest.raises(CheckpointException, match="nothing is committed"):
        save({"w": torch.ones(3)}, writer)
    assert not open_store(place).exists(".metadata")


def test_a_rank_that_outlives_its_job_changes_nothing_of_the_next_one(place: str) -> None:
    dead = BucketWriter(place)
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": torch.ones(3)}, None, True)
    [plan], _ = planner.create_global_plan([planner.create_local_plan()])
    [plan] = dead.prepare_global_plan([plan])
    save({"w": torch.zeros(3)}, BucketWriter(place))
    dead.write_data(plan, planner)
    assert same_bits(load({"w": torch.ones(3)}, place)["w"], torch.zeros(3))
    report = dcp.validate(place, scrub=True)
    assert (report.ok, [found.code for found in report.findings]) == (True, ["files.orphan"])
    save({"w": torch.full((3,), 2.0)}, BucketWriter(place, overwrite=True))
    assert names(place) == [".metadata", "__0_0.distcp"]
    assert_whole(place)


def test_files_and_new_directories_are_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def recording(handle: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", recording)
    save({"w": torch.ones(3)}, BucketWriter(str(tmp_path / "new" / "run" / "step_1")))
    directories = [tmp_path, tmp_path / "new", tmp_path / "new" / "run", tmp_path / "new" / "run" / "step_1"]
    assert set(map(str, directories)) <= set(synced)
    step = str(directories[-1])
    index = next(n for n, path in enumerate(synced) if path.startswith(f"{step}/..metadata"))
    data = next(n for n, path in enumerate(synced) if path.startswith(f"{step}/.__0_"))
    # The data is durable, and its name too, before the index is.
    assert data < synced.index(step) < index < len(synced) - 1 - synced[::-1].index(step)


def test_torchs_planner_may_cache_its_plans(tmp_path: Path) -> None:
    try:
        for step in range(3):
            place = str(tmp_path / str(step))
            planner = DefaultSavePlanner(enable_plan_caching=True)
            save({"w": torch.full((3,), float(step))}, BucketWriter(place), planner=planner)
            assert load({"w": torch.zeros(3)}, place)["w"].eq(step).all()
            assert_whole(place)
    finally:
        for name in vars(SavePlanner):
            if name.startswith("_cached"):
                getattr(SavePlanner, name).clear()


def test_files_of_a_rank_are_written_side_by_side(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp.save.files.LEAST", 1 << 18)
    state = {f"w{n}": torch.full((1 << 16,), float(n)) for n in range(7)} | {"step": 3}
    save(state, BucketWriter(place, files_per_rank=6))
    assert names(place) == [".metadata", *(f"__0_{number}.distcp" for number in range(6))]
    assert_same(load(blank(state), place), state)
    assert_whole(place)


@pytest.mark.parametrize("files", [1, 2, 4, 100])
def test_items_are_dealt_out_evenly_and_each_once(files: int) -> None:
    planner = DefaultSavePlanner()
    state: dict[str, Any] = {f"w{n}": torch.empty(LEAST // 8 * (n + 1), dtype=torch.int8) for n in range(20)}
    planner.set_up_planner(state | {f"o{n}": n for n in range(3)}, None, True)
    items = planner.create_local_plan().items
    dealt = split(items, files)
    assert len(dealt) == min(files, len(state), sum(t.nbytes for t in state.values()) // LEAST)
    assert sorted(id(i) for part in dealt for i in part) == sorted(map(id, items))
    sizes = [sum(state[i.index.fqn].nbytes for i in part if i.tensor_data) for part in dealt]
    assert max(sizes) - min(sizes) <= max(t.nbytes for t in state.values())


def _save_on_a_rank(place: str, sharded: bool, collectives: bool) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(70.0).reshape(10, 7)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(whole, mesh, [Shard(0)]) if sharded else whole
    state = {"w": weight, "b": torch.ones(3), "step": 4}
    torch_checkpoint.save(state, storage_writer=BucketWriter(place), use_collectives=collectives)


def test_ranks_save_together(place: str) -> None:
    run_ranks(_save_on_a_rank, 3, _shared(place), True, True)
    state = load({"w": torch.zeros(10, 7), "b": torch.zeros(3), "step": 0}, place)
    assert_same(state, {"w": torch.arange(70.0).reshape(10, 7), "b": torch.ones(3), "step": 4})
    assert_whole(place)


def test_ranks_save_each_alone(tmp_path: Path) -> None:
    place = str(tmp_path / "step")
    run_ranks(_save_on_a_rank, 2, place, True, False)
    assert [n for n in names(place) if n.endswith("metadata")] == ["__0.metadata", "__1.metadata"]
    state = {"w": torch.zeros(10, 7)}
    with warnings.catch_warnings(action="ignore"):
        torch_checkpoint.load(state, storage_reader=dcp.BucketReader(place), no_dist=True)
    assert same_bits(state["w"], torch.arange(70.0).reshape(10, 7))
    with pytest.raises(RankError, match="overwrite=True"):
        run_ranks(_save_on_a_rank, 2, place, True, False)


def _save_asynchronously(place: str) -> None:
    state = {"w": torch.ones(4), "step": 4}
    future = torch_checkpoint.async_save(state, storage_writer=BucketWriter(place))
    state["w"].zero_()
    assert isinstance(future, torch.futures.Future) or future is not None
    future.result()  # type: ignore[union-attr]


def test_async_save_keeps_what_was_there_when_it_was_called(tmp_path: Path) -> None:
    place = str(tmp_path / "step")
    run_ranks(_save_asynchronously, 2, place)
    assert same_bits(load({"w": torch.zeros(4), "step": 0}, place)["w"], torch.ones(4))


class DyingPlanner(DefaultSavePlanner):
    """Its process is killed while its n-th item is written."""

    def __init__(self, items: int) -> None:
        super().__init__()
        self.left = items

    def resolve_data(self, write_item: WriteItem) -> Any:
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        return super().resolve_data(write_item)


def _die_while_saving(place: str, items: int) -> None:
    import torch.distributed as dist

    state = {f"w{n}": torch.full((20_000,), float(n)) for n in range(8)}
    planner = DyingPlanner(items) if dist.get_rank() == 1 else DefaultSavePlanner()
    torch_checkpoint.save(state, storage_writer=BucketWriter(place, overwrite=True), planner=planner)


@pytest.mark.parametrize("items", [0, 2])
def test_a_rank_that_is_killed_leaves_nothing_that_looks_committed(place: str, items: int) -> None:
    if place.startswith("memory://"):
        pytest.skip("memory is gone with its process")
    save({"w0": torch.zeros(3)}, BucketWriter(place))
    with pytest.raises(RankError, match=r"rank 1 died|rank 0 failed"):
        run_ranks(_die_while_saving, 2, place, items)
    store = open_store(place)
    assert not store.exists(".metadata")
    assert dcp.validate(place).state in ("writing", "incomplete") if _anything(place) else True
    save({"w0": torch.ones(3)}, BucketWriter(place))
    assert_whole(place)


@pytest.mark.parametrize("files", [1, 4])
def test_kills_at_random_moments(place: str, files: int) -> None:
    _shared(place)
    seed = random.randrange(1 << 32)
    moments = random.Random(seed)
    for number in range(2):
        # Shown where it fails.
        print(f"seed {seed}, kill {number}")
        kill_a_save(f"{place}_{number}", files, moments, replaced=number == 1)


def _anything(place: str) -> bool:
    try:
        return bool(names(place))
    except FileNotFoundError:
        return False


def _shared(place: str) -> str:
    if place.startswith("memory://"):
        pytest.skip("memory is not shared between processes")
    return place


def test_wrong_usage() -> None:
    with pytest.raises(UsageError, match="1 to 100000 files"):
        BucketWriter("memory://b/step", files_per_rank=0)
    assert BucketWriter.validate_checkpoint_id("memory://b/step")
    assert not BucketWriter.validate_checkpoint_id("nosuchprotocol://b/step")
