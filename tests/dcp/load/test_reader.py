"""`BucketReader` under torch's own `load`: the same tensors as torch's reader, fewer bytes, no surprises."""

import gzip
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.planner import ReadItem

import dcp
from dcp.checkpoint import open_checkpoint
from dcp.errors import CheckpointError, NotFoundError, NotLoadableError, RecordError, UsageError
from dcp.index import TensorEntry
from dcp.load.reader import BucketReader
from dcp.load.requests import REQUEST
from dcp.validation import validate
from tests.dcp.load.expectations import LOADABLE, Sabotage, expected_tensors, same_bits, save
from tests.support.golden import Golden
from tests.support.ranks import run_ranks
from tests.support.train import SavedCheckpoint

UPSTREAM_CANNOT = {"torch_fsdp2_rank_local", "torch_serialization_safetensors"}


def load(state: dict[str, Any], reader: torch_checkpoint.StorageReader, **options: Any) -> None:
    with warnings.catch_warnings(action="ignore"):  # that it is one process, as was asked
        torch_checkpoint.load(state, storage_reader=reader, no_dist=True, **options)


def empty(entries: list[TensorEntry]) -> dict[str, Any]:
    """Whole tensors to be loaded, full of something else."""
    return {e.key: torch.empty(e.shape, dtype=getattr(torch, e.dtype)).fill_(1) for e in entries}


@pytest.mark.parametrize("golden", LOADABLE, ids=lambda golden: golden.name)
def test_goldens_load_as_expected_and_as_upstream_loads_them(golden: Golden) -> None:
    expected = expected_tensors(golden)
    index = open_checkpoint(str(golden.directory)).index
    entries = [entry for entry in index.tensors if entry.key in expected]
    state = empty(entries)
    load(state, BucketReader(str(golden.directory)))
    assert all(same_bits(state[key], value) for key, value in expected.items())
    if golden.name not in UPSTREAM_CANNOT:
        upstream = empty(entries)
        load(upstream, torch_checkpoint.FileSystemReader(golden.directory))
        assert all(same_bits(state[key], upstream[key]) for key in upstream)


def test_nested_state_and_objects_load_as_upstream_loads_them(fsdp2_checkpoint: SavedCheckpoint) -> None:
    expected = fsdp2_checkpoint.expected()
    index = open_checkpoint(str(fsdp2_checkpoint.path)).index
    states: list[dict[str, Any]] = [{}, {}]
    for state in states:
        for key, value in expected.items():
            blank = torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
            torch_checkpoint._nested_dict.set_element(state, index.path_of(key), blank)
    load(states[0], BucketReader(str(fsdp2_checkpoint.path)))
    load(states[1], torch_checkpoint.FileSystemReader(fsdp2_checkpoint.path))
    flat, other = (torch_checkpoint._nested_dict.flatten_state_dict(state)[0] for state in states)
    assert flat.keys() == other.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert same_bits(flat[key], value)
            assert same_bits(other[key], value)
        else:
            assert flat[key] == other[key] == value


def _load_on_a_rank(path: str, fsdp: int, tp: int, threads: int) -> dict[str, tuple[torch.Tensor, int]]:
    """Load DTensors of all tensors on a (fsdp, tp) mesh; the full tensors again, and the bytes read."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (fsdp, tp))
    state: dict[str, Any] = {}
    for entry in open_checkpoint(path).index.tensors:
        shards = [Shard(dim) if dim < len(entry.shape) else Replicate() for dim in (0, 1)]
        blank = torch.full(entry.shape, 1).to(getattr(torch, entry.dtype))
        state[entry.key] = distribute_tensor(blank, mesh, shards)
    reader = BucketReader(path, threads=threads)
    torch_checkpoint.load(state, storage_reader=reader)
    return {key: (value.full_tensor(), reader.bytes_read) for key, value in state.items()}


@pytest.mark.parametrize(("fsdp", "tp"), [(3, 1), (1, 3)])
def test_two_ranks_save_three_load(fsdp2_checkpoint: SavedCheckpoint, fsdp: int, tp: int) -> None:
    expected = {k: v for k, v in fsdp2_checkpoint.expected().items() if isinstance(v, torch.Tensor)}
    for loaded in run_ranks(_load_on_a_rank, 3, str(fsdp2_checkpoint.path), fsdp, tp, 2):
        assert loaded.keys() == expected.keys()
        for key, value in expected.items():
            assert same_bits(loaded[key][0], value), key


def test_only_the_rows_needed_are_read(tmp_path: Path) -> None:
    whole = torch.arange(4_000_000, dtype=torch.float32).reshape(4000, 1000)
    save({"w": whole}, tmp_path / "step")
    shard = Piece(whole.shape, torch.zeros(100, 1000), (1234, 0))
    reader = BucketReader(str(tmp_path / "step"))
    load({"w": shard}, reader)
    assert same_bits(shard.local, whole[1234:1334])
    assert shard.local.nbytes <= reader.bytes_read <= shard.local.nbytes + 8192
    assert reader.requests == 2


def test_columns_are_read_in_one_pass_over_the_rows(tmp_path: Path) -> None:
    whole = torch.arange(4_000_000, dtype=torch.float32).reshape(4000, 1000)
    save({"w": whole}, tmp_path / "step")
    shard = Piece(whole.shape, torch.zeros(4000, 10), (0, 17))
    reader = BucketReader(str(tmp_path / "step"), memory_budget=1 << 20)
    load({"w": shard}, reader)
    assert same_bits(shard.local, whole[:, 17:27].contiguous())
    assert reader.bytes_read <= whole.nbytes + 8192
    assert reader.requests <= 4


class Committing(DefaultLoadPlanner):
    """Keeps what each tensor held when it was committed."""

    def __init__(self) -> None:
        super().__init__()
        self.committed: list[torch.Tensor] = []

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.committed.append(tensor.clone())


def test_a_tensor_is_committed_once_and_whole(tmp_path: Path) -> None:
    whole = torch.arange(3 * REQUEST // 4, dtype=torch.int32).reshape(-1, 64)
    save({"w": whole}, tmp_path / "step")
    planner = Committing()
    load({"w": torch.zeros_like(whole)}, BucketReader(str(tmp_path / "step")), planner=planner)
    [committed] = planner.committed
    assert same_bits(committed, whole)


class Piece(torch.Tensor):
    """A tensor of which this process holds one region, as torch's planner asks for it."""

    local: torch.Tensor

    @staticmethod
    def __new__(cls, shape: torch.Size, local: torch.Tensor, offsets: tuple[int, ...]) -> "Piece":
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype)
        made.local = local
        made.offsets = offsets
        return made

    def __create_chunk_list__(self) -> list[Any]:
        box = torch_checkpoint.metadata.ChunkStorageMetadata(torch.Size(self.offsets), self.local.size())
        return [box]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.local

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(6, 5, dtype=torch.float64),
        torch.zeros(6, 5, dtype=torch.bfloat16),
        torch.zeros(5, 6).T,
        torch.zeros(6, 5, dtype=torch.complex64).conj(),
    ],
    ids=["wider", "narrower", "strided", "conjugated"],
)
def test_targets_of_another_dtype_or_stride_get_what_upstream_gives(
    tmp_path: Path, target: torch.Tensor
) -> None:
    save({"w": torch.randn(6, 5, dtype=torch.complex64 if target.is_complex() else None)}, tmp_path / "step")
    ours, theirs = {"w": target.clone()}, {"w": target.clone()}
    load(ours, BucketReader(str(tmp_path / "step")))
    load(theirs, torch_checkpoint.FileSystemReader(tmp_path / "step"))
    assert same_bits(ours["w"], theirs["w"])
    assert ours["w"].any()


def test_a_bucket_url(golden: Callable[[str], Path], request: pytest.FixtureRequest) -> None:
    url = f"memory://{request.node.name}/step"
    files = fsspec.filesystem("memory")
    files.put(str(golden("torch_fsdp_tp_2x2")) + "/", url + "/", recursive=True)
    [wanted] = [g for g in LOADABLE if g.name == "torch_fsdp_tp_2x2"]
    expected = expected_tensors(wanted)
    state: dict[str, Any] = {key: torch.zeros_like(value) for key, value in expected.items()}
    load(state, BucketReader(url))
    files.rm(url, recursive=True)
    assert all(same_bits(state[key], value) for key, value in expected.items())


def test_a_reader_can_be_sent_elsewhere(golden: Callable[[str], Path]) -> None:
    reader = BucketReader("no/such/place")
    [wanted] = [g for g in LOADABLE if g.name == "torch_tied"]
    state: dict[str, Any] = {key: torch.zeros_like(value) for key, value in expected_tensors(wanted).items()}
    load(state, reader, checkpoint_id=str(golden("torch_tied")))
    assert all(same_bits(state[key], value) for key, value in expected_tensors(wanted).items())
    assert reader.checkpoint_id == str(golden("torch_tied"))


def cause(caught: pytest.ExceptionInfo[BaseException]) -> BaseException:
    """What torch wrapped; its own exception is not even an `Exception`."""
    assert isinstance(caught.value, CheckpointException)
    [(error, _)] = caught.value.failures.values()
    return error


def test_a_flipped_bit_is_an_error(golden_copy: Callable[[str], Path]) -> None:
    path = golden_copy("torch_tied")
    [entry, *_] = open_checkpoint(str(path)).index.tensors
    [chunk] = entry.chunks
    assert chunk.record is not None
    data = path / chunk.record.path
    content = bytearray(data.read_bytes())
    content[chunk.record.offset + 704] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointException) as caught:
        load(empty([entry]), BucketReader(str(path), copied=True))
    error = cause(caught)
    assert isinstance(error, RecordError)
    assert (error.code, error.key, error.file) == ("records.corrupt", entry.key, chunk.record.path)


def test_no_index_is_said_plainly(golden_copy: Callable[[str], Path]) -> None:
    path = golden_copy("torch_tied")
    (path / ".metadata").unlink()
    with pytest.raises(CheckpointException, match=r"has no \.metadata") as caught:
        load({"w": torch.zeros(1)}, BucketReader(str(path)))
    assert isinstance(cause(caught), NotLoadableError)
    with pytest.raises(CheckpointException) as caught:
        load({"w": torch.zeros(1)}, BucketReader(path / "nowhere"))
    assert isinstance(cause(caught), NotFoundError)
    with pytest.raises(NotLoadableError):
        _ = BucketReader(path).read_metadata().state_dict_metadata


def test_an_object_that_runs_code_needs_trust(tmp_path: Path) -> None:
    save({"o": Sabotage(tmp_path / "ran")}, tmp_path / "step")
    with pytest.raises(CheckpointException) as caught:
        load({"o": None}, BucketReader(str(tmp_path / "step")))
    error = cause(caught)
    assert isinstance(error, CheckpointError)
    assert (error.code, error.key) == ("records.unsafe", "o")
    assert "trust_objects=True" in str(error)
    assert not (tmp_path / "ran").exists()
    load({"o": None}, BucketReader(str(tmp_path / "step"), trust_objects=True))
    assert (tmp_path / "ran").exists()


class Configuration:
    """A class of the user's own, whose state runs code."""

    def __init__(self, path: Path, lr: float) -> None:
        self.path = path
        self.lr = lr

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.path.touch()


class OpensFile:
    """Unpickling it makes an empty archive, with a function that is on no list."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return gzip.open, (str(self.path), "w")


def test_classes_on_no_list_are_named_together_before_anything_is_loaded(tmp_path: Path) -> None:
    weight = torch.ones(4 << 20)
    mine, other = Configuration(tmp_path / "state", 0.1), OpensFile(tmp_path / "opened")
    save({"a": weight, "good": {"n": 1}, "mine": [mine], "z": (other,)}, tmp_path / "step")
    (tmp_path / "state").unlink(missing_ok=True)
    (tmp_path / "opened").unlink(missing_ok=True)
    state = {"a": torch.zeros_like(weight), "good": {"n": 0}, "mine": [None], "z": (None,)}
    with pytest.raises(CheckpointException) as caught:
        load(state, BucketReader(tmp_path / "step"))
    error = cause(caught)
    assert isinstance(error, RecordError)
    names = ["gzip.open", f"{__name__}.Configuration"]
    assert error.detail["globals"] == names
    assert len(error.detail["keys"]) == 2
    assert f"allow={names!r}" in str(error)
    assert "mine" in str(error)
    assert not state["a"].any()
    assert state["good"] == {"n": 0}
    assert not (tmp_path / "state").exists()
    assert not (tmp_path / "opened").exists()
    with pytest.raises(CheckpointException) as caught:
        load(state, BucketReader(tmp_path / "step", allow=names[1:]))
    assert "gzip.open" in str(cause(caught))
    assert "Configuration" not in str(cause(caught))
    load(state, BucketReader(tmp_path / "step", allow=[f"{__name__}.*", "gzip.open"]))
    assert (tmp_path / "state").exists()
    assert (tmp_path / "opened").exists()
    assert state["a"].all()


@pytest.mark.parametrize(
    "given", [{"threads": 0}, {"memory_budget": 0}, {"memory_budget": -5}, {"allow": "pkg.Class"}]
)
def test_arguments_that_make_no_sense_are_refused_at_once(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="|".join(given) + "|list"):
        BucketReader(tmp_path, **given)
    with pytest.raises(UsageError, match="text or a path"):
        BucketReader(7)  # type: ignore[arg-type]


def test_a_reader_reads_the_index_anew_for_each_load(tmp_path: Path) -> None:
    reader = BucketReader(tmp_path / "step")
    for value, size in ((1.0, 8), (2.0, 4096)):
        save({"w": torch.full((size,), value)}, tmp_path / "step")
        state = {"w": torch.zeros(size)}
        load(state, reader)
        assert (state["w"] == value).all()


def test_what_a_checkpoint_id_may_be() -> None:
    assert BucketReader.validate_checkpoint_id(Path("step"))
    assert BucketReader.validate_checkpoint_id("memory://bucket/step")
    assert not BucketReader.validate_checkpoint_id("nosuchprotocol://bucket/step")


def per_tensor(values: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(values, 0.01, 3, torch.qint8)


def per_channel(values: torch.Tensor, scale: float = 0.1) -> torch.Tensor:
    scales, zeros = torch.full(values.shape[:1], scale, dtype=torch.float64), torch.zeros(len(values))
    return torch.quantize_per_channel(values, scales, zeros.long(), 0, torch.quint8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("quantize", [per_tensor, per_channel])
def test_quantized_tensors_load_as_upstream_loads_them(
    tmp_path: Path, quantize: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    saved = {"q": quantize(torch.rand(30, 4)), "w": torch.rand(5)}
    save(dict(saved), tmp_path / "step")
    states = [{"q": quantize(torch.zeros(30, 4)), "w": torch.zeros(5)} for _ in range(2)]
    load(states[0], BucketReader(str(tmp_path / "step")))
    load(states[1], torch_checkpoint.FileSystemReader(tmp_path / "step"))
    for state in states:
        assert torch.equal(state["w"], saved["w"])
        assert torch.equal(state["q"].int_repr(), saved["q"].int_repr())
        assert torch.equal(state["q"].dequantize(), saved["q"].dequantize())


@pytest.mark.filterwarnings("ignore")
def test_scales_are_loaded_too(tmp_path: Path) -> None:
    saved = per_channel(torch.rand(3, 4))
    save({"q": saved}, tmp_path / "step")
    state = {"q": per_channel(torch.zeros(3, 4), scale=0.5)}
    load(state, BucketReader(str(tmp_path / "step")))
    assert torch.equal(state["q"].dequantize(), saved.dequantize())


class Viewing(DefaultLoadPlanner):
    """Gives views to load into, as for a shard of a tensor."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return super().resolve_tensor(read_item).detach()


@pytest.mark.filterwarnings("ignore")
def test_scales_that_a_view_does_not_take_are_no_silent_change_of_values(tmp_path: Path) -> None:
    save({"q": per_channel(torch.rand(3, 4))}, tmp_path / "step")
    state = {"q": per_channel(torch.zeros(3, 4), scale=0.5)}
    with pytest.raises((RecordError, CheckpointException), match="view with scales of its own"):
        load(state, BucketReader(str(tmp_path / "step")), planner=Viewing())


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_quantized_tensor_is_an_error(tmp_path: Path) -> None:
    saved = per_tensor(torch.rand(30, 4))
    save({"q": saved}, tmp_path / "step")
    data = bytearray((tmp_path / "step" / "__0_0.distcp").read_bytes())
    data[data.index(saved.int_repr().numpy().tobytes()) + 7] ^= 1
    (tmp_path / "step" / "__0_0.distcp").write_bytes(data)
    with pytest.raises((RecordError, CheckpointException), match=r"q: .*CRC"):
        load({"q": per_tensor(torch.rand(30, 4))}, BucketReader(str(tmp_path / "step")))
    report = dcp.validate(str(tmp_path / "step"), scrub=True)
    assert [(found.code, found.key) for found in report.findings] == [("records.corrupt", "q")]


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_tensor_goes_into_no_plain_one(tmp_path: Path) -> None:
    save({"q": per_tensor(torch.rand(30, 4))}, tmp_path / "step")
    said = r"q .*quantized \(qu?int8\), and the tensor to load into is float32: .* dequantize\(\)"
    with pytest.raises((RecordError, CheckpointException), match=said):
        load({"q": torch.zeros(30, 4)}, BucketReader(str(tmp_path / "step")))


def test_a_class_that_torch_does_not_know_is_named_with_what_to_do(
    golden: Callable[[str], Path],
) -> None:
    with pytest.raises((RecordError, CheckpointException)) as caught:
        load({"model.0.weight": torch.zeros(32, 32)}, BucketReader(str(golden("torch_torchao"))))
    assert "model.0.weight" in str(caught.value)
    assert "Import the library that defines the class" in str(caught.value)


def test_a_target_whose_elements_share_memory_is_refused(tmp_path: Path) -> None:
    save({"w": torch.rand(5, 3)}, tmp_path / "step")
    with pytest.raises((UsageError, CheckpointException), match=r"w: elements .* share memory"):
        load({"w": torch.zeros(1, 3).expand(5, 3)}, BucketReader(str(tmp_path / "step")))


@pytest.mark.parametrize(
    "objects", [{}, {"o": [1, 2]}, {"o": [1, 2], "p": "x" * 5000}], ids=["none", "one", "two"]
)
def test_safetensors_files_with_empty_tensors_and_objects_are_no_damage(
    tmp_path: Path, objects: dict[str, Any]
) -> None:
    saved = {"a": torch.rand(300, 4), "b": torch.zeros(0, 3), "c": torch.ones(2).half(), "d": torch.rand(5)}
    writer = FileSystemWriter(tmp_path / "step", serialization_format=SerializationFormat.SAFETENSORS)
    with warnings.catch_warnings(action="ignore"):
        torch_checkpoint.save({**saved, **objects}, storage_writer=writer, no_dist=True)
    report = validate(str(tmp_path / "step"), scrub=True)
    assert report.ok
    assert not [found for found in report.findings if found.severity == "error"]
    state = {key: torch.zeros_like(value) for key, value in saved.items()}
    load(state, BucketReader(str(tmp_path / "step")))
    assert all(same_bits(state[key], value) for key, value in saved.items())
