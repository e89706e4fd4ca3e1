"""What cannot be saved is refused with its key, and before a step that is to be replaced is touched."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import dcp
from dcp.errors import CheckpointError, ForbiddenError, UsageError
from dcp.save import BucketWriter, CheckedSavePlanner
from dcp.save.shared import Divergence
from tests.dcp.save.saving import load, names, save
from tests.support.ranks import RankError, run_ranks


class Unpicklable:
    """Raises what it is told to when it is pickled."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


@pytest.mark.parametrize("planner", [DefaultSavePlanner, CheckedSavePlanner])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("no")], ids=str)
def test_an_object_that_cannot_be_pickled_is_named_and_costs_no_step(
    place: str, planner: type[DefaultSavePlanner], error: Exception
) -> None:
    save({"w": torch.ones(3)}, BucketWriter(place))
    state = {"w": torch.zeros(3), "loop": {"hook": Unpicklable(error)}}
    with pytest.raises(CheckpointException) as caught:
        save(state, BucketWriter(place, overwrite=True), planner=planner())
    told = caught.value.failures[0][0]
    assert isinstance(told, UsageError)
    assert str(told).startswith(
        f"loop.hook cannot be pickled ({type(error).__name__}: {error}): leave it out"
    )
    assert names(place) == [".metadata", "__0_0.distcp"]
    assert load({"w": torch.zeros(3)}, place)["w"].eq(1).all()


def test_also_torchs_own_writer_is_told_the_key(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"f cannot be pickled \(AttributeError: "):
        save({"f": lambda: 1}, FileSystemWriter(tmp_path / "s"), planner=CheckedSavePlanner())


def _replace_with_an_unpicklable_one(place: str) -> None:
    rank = torch.distributed.get_rank()
    state: dict[str, Any] = {"step": 1}
    torch_checkpoint.save(state, storage_writer=BucketWriter(place), planner=CheckedSavePlanner())
    if rank == 1:
        state["bad"] = Unpicklable(RuntimeError("no"))
    writer = BucketWriter(place, overwrite=True)
    with pytest.raises(CheckpointException, match="bad cannot be pickled") as caught:
        torch_checkpoint.save(state, storage_writer=writer, planner=CheckedSavePlanner())
    assert list(caught.value.failures) == [1]


def test_an_object_of_one_rank_costs_no_step(tmp_path: Path) -> None:
    place = str(tmp_path / "step")
    run_ranks(_replace_with_an_unpicklable_one, 2, place)
    assert dcp.validate(place, scrub=True).ok


def _save_shards(place: str, rows: list[int]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))
    local = torch.ones(rows[torch.distributed.get_rank()], 3)
    whole = {"shape": torch.Size((9, 3)), "stride": (3, 1)}
    value = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **whole)
    torch_checkpoint.save({"w": value}, storage_writer=BucketWriter(place), planner=CheckedSavePlanner())


@pytest.mark.parametrize("rows", [[5, 2], [5, 5]])
def test_a_shard_that_is_not_what_its_tensor_says_is_refused(tmp_path: Path, rows: list[int]) -> None:
    said = rf"w: the shard of rank 1 has shape \[{rows[1]}, 3\], but by .* the DTensor has \[4, 3\] there"
    with pytest.raises(RankError, match=said):
        run_ranks(_save_shards, 2, str(tmp_path / "step"), rows)
    assert not (tmp_path / "step").exists()


def test_uneven_shards_are_what_their_tensor_says(tmp_path: Path) -> None:
    run_ranks(_save_shards, 2, str(tmp_path / "true"), [5, 4])
    assert dcp.validate(str(tmp_path / "true"), scrub=True).ok


class Shortened(DefaultSavePlanner):
    """Gives less of a tensor than it has planned."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        assert isinstance(data, torch.Tensor)
        return data[:2]


def test_no_file_holds_another_shape_than_its_index_says(place: str) -> None:
    with pytest.raises(CheckpointException, match=r"w: a shard has shape \[2\], .* it has \[3\]") as caught:
        save({"w": torch.ones(3)}, BucketWriter(place), planner=Shortened())
    assert isinstance(caught.value.failures[0][0], CheckpointError)


def _save_each_alone(place: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch_checkpoint.save(
            {"position": torch.distributed.get_rank()},
            storage_writer=BucketWriter(place),
            planner=CheckedSavePlanner(),
            use_collectives=False,
        )
    return [str(warning.message) for warning in caught if "is compared" in str(warning.message)]


def test_ranks_that_compare_nothing_say_so(tmp_path: Path) -> None:
    told = run_ranks(_save_each_alone, 2, str(tmp_path / "step"))
    assert told[0] == []  # the coordinator sees what it would see in a save of its own
    assert "with use_collectives=False nothing is compared between the 2 ranks" in told[1][0]


@pytest.mark.parametrize("planner", [CheckedSavePlanner, DefaultSavePlanner])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.ones(3, device="meta"), "model.w is on the meta device and has no values"),
        (torch.eye(3).to_sparse(), r"model.w is a tensor of layout sparse_coo, .* to_dense\(\)"),
    ],
)
def test_tensors_that_have_no_record_are_named(
    tmp_path: Path, planner: type[DefaultSavePlanner], value: torch.Tensor, said: str
) -> None:
    with pytest.raises(CheckpointException, match=said):
        save({"model": {"w": value}}, BucketWriter(str(tmp_path / "step")), planner=planner())
    assert not list(tmp_path.rglob("*.*"))


class Tagged(torch.Tensor):
    """A tensor of a class of its own, which can be imported."""


def test_tensors_that_nobody_could_load_are_named(tmp_path: Path) -> None:
    class Local(torch.Tensor):
        pass

    with FakeTensorMode():
        fake = torch.ones(3)
    with warnings.catch_warnings(action="ignore"):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    values = {
        "is a FakeTensor and has no values": fake,
        "is a nested tensor, .* unbind": nested,
        "is a nested tensor": jagged,
        "has no shape and no values yet": torch.nn.UninitializedParameter(),
        r"is of the class .*\.Local, .* define it at the top": torch.ones(3).as_subclass(Local),
    }
    for said, value in values.items():
        writer = BucketWriter(str(tmp_path / "step"))
        with pytest.raises(CheckpointException, match=rf"model\.w {said}"):
            save({"model": {"w": value}}, writer, planner=CheckedSavePlanner())
    assert not list(tmp_path.rglob("*.*"))
    # What has a name is saved as torch saves it.
    save({"w": torch.ones(3).as_subclass(Tagged)}, writer, planner=CheckedSavePlanner())
    held = torch.zeros(3)
    with torch.serialization.safe_globals([Tagged]):
        load({"w": held}, writer.url)
    assert torch.equal(held, torch.ones(3))


@pytest.mark.parametrize(("dtype", "view"), [(torch.int4, torch.uint8), (torch.bits16, torch.int16)])
def test_sub_byte_tensors_are_named_and_their_views_are_saved(
    tmp_path: Path, dtype: torch.dtype, view: torch.dtype
) -> None:
    value = torch.arange(8, dtype=torch.uint8).view(dtype)
    place, name = str(tmp_path / "step"), str(view).removeprefix("torch.")
    with pytest.raises(
        CheckpointException, match=rf"m\.w is of type .*, .* cannot save: .* view\(torch\.{name}\)"
    ):
        save({"m": {"w": value}}, BucketWriter(place), planner=CheckedSavePlanner())
    save({"m": {"w": value.view(view)}}, BucketWriter(place), planner=CheckedSavePlanner())
    held = torch.zeros(8, dtype=torch.uint8).view(dtype)
    load({"m": {"w": held.view(view)}}, place)
    assert torch.equal(held.view(torch.uint8), torch.arange(8, dtype=torch.uint8))


def test_parts_of_a_sum_are_named_on_both_ways(tmp_path: Path) -> None:
    place = str(tmp_path / "step")
    save({"m": {"w": torch.ones(3)}}, BucketWriter(place))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        state = {"m": {"w": DTensor.from_local(torch.ones(3), mesh, [Partial()])}}
        with pytest.raises(
            CheckpointException, match=r"m\.w is a DTensor with a Partial placement, .* redistrib"
        ):
            save(state, BucketWriter(str(tmp_path / "other")), planner=CheckedSavePlanner())
        reader, strict = dcp.BucketReader(place), dcp.StrictLoadPlanner()
        with pytest.raises(CheckpointException, match=r"m\.w of the state dict is a DTensor with a Partial"):
            torch_checkpoint.load(state, storage_reader=reader, planner=strict, no_dist=True)
    finally:
        distributed.destroy_process_group()
    assert not (tmp_path / "other").exists()


def test_patterns_that_meet_nothing_are_warned_of(tmp_path: Path) -> None:
    state = {"rng": torch.ones(2), "w": torch.ones(2)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        planner = CheckedSavePlanner(per_rank=["rng", "zzz*"])
        torch_checkpoint.save(
            state, storage_writer=BucketWriter(str(tmp_path / "s")), planner=planner, no_dist=True
        )
    told = [str(warning.message) for warning in caught if "per_rank" in str(warning.message)]
    assert told == ["per_rank pattern 'zzz*' meets no key of the state: nothing is saved per rank for it"]


@pytest.mark.parametrize(
    ("groups", "kinds", "said"),
    [
        (4, ["an object"], "k differs between rank 0 and rank 1 and rank 2 and rank 3"),
        (9, ["an object"], " and rank 7 and rank 8"),
        (11, ["an object"], " and rank 7 and 3 more sides (ranks 8, 9, 10)"),
        (2, ["an object", "a tensor"], "k is an object on rank 0 and a tensor on rank 1"),
    ],
)
def test_a_divergence_names_every_side(groups: int, kinds: list[str], said: str) -> None:
    text = str(Divergence("k", tuple((n,) for n in range(groups)), tuple((kinds * groups)[:groups])))
    assert text.endswith(said)


def _save_other_dtypes(place: str) -> None:
    dtype = torch.bfloat16 if torch.distributed.get_rank() == 1 else torch.float32
    state = {"t": torch.ones(3, dtype=dtype)}
    torch_checkpoint.save(state, storage_writer=BucketWriter(place), planner=CheckedSavePlanner())


def test_what_differs_is_said(tmp_path: Path) -> None:
    tensor = r"a tensor of shape \[3\] and "
    said = f"t is {tensor}float32 on rank 0 and {tensor}bfloat16 on rank 1"
    with pytest.raises(RankError, match=said):
        run_ranks(_save_other_dtypes, 2, str(tmp_path / "step"))


def test_a_reader_refuses_the_same_places_and_options(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown protocol 'foo'"):
        dcp.BucketReader("foo://bucket/step")
    for place in (str(tmp_path), "memory://b/step"):
        with pytest.raises(UsageError, match="'memory_bugdet'; it seems that 'memory_budget' is meant"):
            dcp.BucketReader(place, memory_bugdet=1)
    with pytest.raises(UsageError, match=r"no option 'token', and .* is a local path"):
        dcp.BucketReader(tmp_path, token="anon")


def test_places_and_options_that_are_not_possible(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown protocol 'foo'"):
        BucketWriter("foo://bucket/step")
    with pytest.raises(UsageError, match="unknown protocol 'foo'"):
        BucketWriter(tmp_path).reset("foo://bucket/step")
    for place in (str(tmp_path), "memory://b/step"):
        with pytest.raises(UsageError, match="no option 'overwite'; it seems that 'overwrite' is meant"):
            BucketWriter(place, overwite=True)
    with pytest.raises(UsageError, match=r"no option 'token', and .* is a local path"):
        BucketWriter(tmp_path, token="anon")
    assert BucketWriter("memory://b/step", skip_instance_cache=True).url == "memory://b/step"


def test_a_local_place_may_be_a_path(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, BucketWriter(tmp_path / "step"))
    assert load({"w": torch.zeros(3)}, str(tmp_path / "step"))["w"].eq(1).all()


def test_where_nothing_can_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in ("file", "file/step"):
        with pytest.raises(
            CheckpointException, match=f"{tmp_path}/file is a file: name a directory"
        ) as caught:
            save({"w": torch.ones(3)}, BucketWriter(tmp_path / place))
        assert isinstance(caught.value.failures[0][0], UsageError)
    with pytest.raises(CheckpointException, match="no directory can be made in /proc") as caught:
        save({"w": torch.ones(3)}, BucketWriter("/proc/step"))
    assert isinstance(caught.value.failures[0][0], ForbiddenError)
