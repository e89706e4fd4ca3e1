"""Importing: what was in the file is in the checkpoint to the bit, sharded as DTensor shards; or refused."""

import os
import pickle
import re
import struct
import sys
import uuid
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from isal import isal_zlib
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import dcp
from dcp.advice import advice_for
from dcp.errors import AlreadyExistsError, CheckpointError, NotFoundError, SourceFileError, UsageError
from dcp.layout import Layout
from dcp.save import import_torch_save
from tests.dcp.load.expectations import Sabotage, same_bits
from tests.dcp.save.saving import assert_same, awkward_state, blank, flat, load, names
from tests.support.ranks import run_ranks
from tests.support.train import SavedCheckpoint


def write(state: Any, path: Path) -> str:
    torch.save(state, path)
    return str(path)


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_in_the_file_is_in_the_checkpoint(tmp_path: Path, place: str, ranks: int) -> None:
    state = awkward_state() | {
        "ordered": OrderedDict(b=torch.ones(2), a=1),
        "more": [torch.ones(7), {"x": 1}],
    }
    report = import_torch_save(write(state, tmp_path / "in.pt"), place, ranks)
    assert (report.ok, report.ranks, report.keys) == (True, ranks, len(flat(state)))
    checked = dcp.validate(place, scrub=True)
    assert checked.ok, checked.findings
    assert not checked.findings
    assert_same(load(blank(state), place), state)
    exported = tmp_path / "out.pt"
    dcp.export(place, str(exported))
    assert_same(torch.load(exported, weights_only=True), state)


def test_chunks_are_those_of_dtensors(tmp_path: Path) -> None:
    state = {"w": torch.arange(35.0).reshape(5, 7), "few": torch.ones(2), "s": torch.tensor(1.0)}
    import_torch_save(write(state, tmp_path / "in.pt"), str(tmp_path / "step"), 4)
    layout = Layout(fsdp=4)
    for entry in dcp.read_index(str(tmp_path / "step")).tensors:
        wanted = {box.offsets: box for box in reversed(layout.boxes(entry.shape))}
        assert {chunk.box for chunk in entry.chunks} == set(wanted.values())
        for chunk in entry.chunks:
            assert chunk.record is not None
            assert layout.boxes(entry.shape)[int(chunk.record.path[2])] == chunk.box


def test_a_trained_state_comes_back(fsdp2_checkpoint: SavedCheckpoint, tmp_path: Path) -> None:
    first, again = str(tmp_path / "a.pt"), str(tmp_path / "b.pt")
    dcp.export(str(fsdp2_checkpoint.path), first)
    place = str(tmp_path / "step")
    import_torch_save(first, place, 2)
    assert dcp.diff(str(fsdp2_checkpoint.path), place, values=True).same
    dcp.export(place, again)
    assert_same(torch.load(again, weights_only=True), torch.load(first, weights_only=True))


def test_requires_grad_and_dropped_values_are_told(tmp_path: Path) -> None:
    state = {"p": torch.nn.Parameter(torch.ones(3)), "d": defaultdict(int, a=1), "empty": {}, "none": []}
    report = import_torch_save(write(state, tmp_path / "in.pt"), str(tmp_path / "step"))
    assert report.dropped == ["empty"]
    index = dcp.read_index(str(tmp_path / "step"))
    assert set(index.entries) == {"p", "d.a", "none"}


def test_a_large_strided_tensor_goes_in_pieces(tmp_path: Path) -> None:
    state = {"t": torch.arange(6_000_000, dtype=torch.int32).reshape(2000, 3000).T}
    place = str(tmp_path / "step")
    import_torch_save(write(state, tmp_path / "in.pt"), place, 3)
    assert same_bits(load({"t": torch.zeros(3000, 2000, dtype=torch.int32)}, place)["t"], state["t"])


class Unknown:
    """A class that no list knows."""


def test_unknown_classes_need_leave(tmp_path: Path) -> None:
    path, place = write({"o": Unknown(), "w": torch.ones(2)}, tmp_path / "in.pt"), str(tmp_path / "step")
    with pytest.raises(CheckpointError, match=r"Unknown.*--allow-pickle") as caught:
        import_torch_save(path, place)
    assert caught.value.code == "records.unsafe"
    assert not Path(place).exists()
    import_torch_save(path, place, allow_pickle=True)
    assert isinstance(load({"o": None}, place)["o"], Unknown)


def test_nothing_is_run(tmp_path: Path) -> None:
    path = write({"o": Sabotage(tmp_path / "ran")}, tmp_path / "in.pt")
    with pytest.raises(CheckpointError, match="mkdir"):
        import_torch_save(path, str(tmp_path / "step"))
    import_torch_save(path, str(tmp_path / "step"), allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def damaged(path: Path, entry: str = "data/0") -> str:
    """The file with one bit of an entry's content flipped."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        [info] = [info for info in archive.infolist() if info.filename.partition("/")[2] == entry]
    head = info.header_offset
    start = head + 30 + sum(struct.unpack_from("<HH", content, head + 26))
    content[start + info.file_size // 2] ^= 1
    path.write_bytes(content)
    return str(path)


STRIDED = torch.arange(1000.0).reshape(10, 100)[:, ::3]


@pytest.mark.parametrize(
    ("state", "entry"),
    [
        ({"w": torch.arange(1000.0)}, "data/0"),
        ({"w": torch.arange(1000.0)}, "version"),
        ({"w": torch.arange(1000.0)}, "data.pkl"),
        ({"view": torch.arange(1000.0)[10:20]}, "data/0"),
        ({"strided": STRIDED}, "data/0"),
        ({"object": {1, 2}, "sparse": torch.eye(3).to_sparse()}, "data/1"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_damage_anywhere_leaves_no_checkpoint(
    tmp_path: Path, place: str, state: dict[str, Any], entry: str
) -> None:
    path = damaged(Path(write(state, tmp_path / "in.pt")), entry)
    with pytest.raises(SourceFileError, match=rf"{re.escape(path)}: .*CRC") as caught:
        import_torch_save(path, place, 3)
    assert (caught.value.code, caught.value.file) == ("records.corrupt", path)
    assert "ckpt" not in advice_for(caught.value, place)
    with pytest.raises(NotFoundError):
        names(place)


def test_a_file_cut_off_is_refused(tmp_path: Path) -> None:
    path = Path(write({"w": torch.arange(1000.0)}, tmp_path / "in.pt"))
    content = path.read_bytes()
    for size in (0, 3, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(SourceFileError, match=re.escape(str(path))):
            import_torch_save(str(path), str(tmp_path / "step"))
    assert not (tmp_path / "step").exists()


def test_a_directory_that_was_there_stays(tmp_path: Path) -> None:
    place = tmp_path / "step"
    place.mkdir()
    path = damaged(Path(write({"w": torch.arange(1000.0)}, tmp_path / "in.pt")))
    with pytest.raises(SourceFileError):
        import_torch_save(path, str(place))
    assert list(place.iterdir()) == []


def test_damage_does_not_cost_the_checkpoint_that_was_to_be_replaced(tmp_path: Path) -> None:
    place = str(tmp_path / "step")
    import_torch_save(write({"w": torch.ones(2)}, tmp_path / "good.pt"), place)
    path = damaged(Path(write({"w": torch.zeros(1000)}, tmp_path / "bad.pt")))
    with pytest.raises(CheckpointError, match="CRC"):
        import_torch_save(path, place, overwrite=True)
    assert load({"w": torch.zeros(2)}, place)["w"].eq(1).all()


def resident() -> int:
    """Bytes of memory that this process has, mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    bound = 80 << 20
    square = torch.zeros(4096, 8192)
    path = write({"plain": square, "turned": torch.ones(4096, 8192).T}, tmp_path / "in.pt")
    del square
    assert Path(path).stat().st_size > 3 * bound
    before, peak = resident(), 0

    def look(*_: int) -> None:
        nonlocal peak
        peak = max(peak, resident())

    import_torch_save(path, str(tmp_path / "step"), 2, progress=look)
    assert peak - before < bound


def test_every_byte_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp.save.torch_source.BLOCK", 1 << 12)
    hashed: list[int] = []
    crc32 = isal_zlib.crc32

    def counting(data: Any, *rest: int) -> int:
        hashed.append(len(memoryview(data)))
        return crc32(data, *rest)

    monkeypatch.setattr(isal_zlib, "crc32", counting)
    large, place = torch.randn(30_000, 5), str(tmp_path / "step")
    path = write({"a": large, "tied": large, "view": large[3:5]}, tmp_path / "in.pt")
    import_torch_save(path, place, 7)
    # Once for each of its two keys; what the file says of itself is some kilobytes.
    assert 2 * large.nbytes <= sum(hashed) < 2 * large.nbytes + 150_000
    loaded = load(
        {"a": torch.zeros(30_000, 5), "tied": torch.zeros(30_000, 5), "view": torch.zeros(2, 5)}, place
    )
    assert same_bits(loaded["a"], large)
    assert same_bits(loaded["tied"], large)
    assert same_bits(loaded["view"], large[3:5])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_view_goes_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    monkeypatch.setattr("dcp.save.torch_source.BLOCK", data.draw(st.sampled_from([8, 64, 1 << 12])))
    monkeypatch.setattr("dcp.save.torch_source.MOST_APART", data.draw(st.sampled_from([16, 200, 1 << 12])))
    shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
    base = torch.arange(3.0 + 8 * 5**4)
    strides = [data.draw(st.integers(0, 60)) for _ in shape]
    tensor = base.as_strided(shape, strides, data.draw(st.integers(0, 3)))
    if data.draw(st.booleans()):
        tensor = tensor.to(torch.complex64).conj()
    place = str(tmp_path / uuid.uuid4().hex)
    import_torch_save(write({"t": tensor}, tmp_path / "in.pt"), place, data.draw(st.integers(1, 4)))
    loaded = load({"t": torch.zeros(shape, dtype=tensor.dtype)}, place)["t"]
    assert same_bits(loaded, tensor.clone(memory_format=torch.contiguous_format))


def test_a_small_file_cannot_fill_a_disk(tmp_path: Path) -> None:
    path = write({"w": torch.zeros(1).expand(1 << 40)}, tmp_path / "in.pt")
    with pytest.raises(CheckpointError, match="expanded"):
        import_torch_save(path, str(tmp_path / "step"))
    small = write({"w": torch.tensor([2.0]).expand(3, 4)}, tmp_path / "small.pt")
    import_torch_save(small, str(tmp_path / "step"), 2)
    assert load({"w": torch.zeros(3, 4)}, str(tmp_path / "step"))["w"].eq(2).all()


def test_a_committed_step_is_kept(tmp_path: Path, place: str) -> None:
    path = write({"w": torch.ones(2)}, tmp_path / "in.pt")
    import_torch_save(path, place, 2)
    with pytest.raises(AlreadyExistsError):
        import_torch_save(path, place)
    assert names(place) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    import_torch_save(path, place, overwrite=True)
    assert names(place) == [".metadata", "__0_0.distcp"]


DTYPES = [
    *(torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    *(torch.complex64, torch.complex128, torch.complex32, torch.uint16, torch.uint64, torch.bool, torch.int8),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_types_of_elements(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.arange(64 * dtype.itemsize, dtype=torch.uint8)
    tensor = raw.ne(0) if dtype is torch.bool else raw.view(dtype)
    state = {"t": tensor.reshape(8, 8), "column": tensor.reshape(8, 8)[:, 1], "none": tensor[:0]}
    place = str(tmp_path / "step")
    import_torch_save(write(state, tmp_path / "in.pt"), place, 3)
    assert_same(load({key: torch.zeros_like(value) for key, value in state.items()}, place), state)


def test_sparse_tensors_are_kept_as_objects(tmp_path: Path) -> None:
    values = torch.tensor([1.0, 2.0, -3.0])
    place, again = str(tmp_path / "step"), str(tmp_path / "out.pt")
    import_torch_save(write({"sparse": values.to_sparse()}, tmp_path / "in.pt"), place, 2)
    dcp.export(place, again)
    assert torch.load(again)["sparse"].to_dense().equal(values)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_quantized_tensors_are_the_tensors_that_torch_saves(tmp_path: Path) -> None:
    values = torch.arange(12.0).reshape(4, 3)
    quantized = torch.quantize_per_tensor(values, 0.1, 3, torch.qint8)
    channels = torch.quantize_per_channel(values, torch.ones(4), torch.zeros(4), 0, torch.qint8)
    state = {"q": quantized, "list": [channels, quantized[1:]], "n": 1}
    saved, place = str(tmp_path / "saved"), str(tmp_path / "step")
    torch_checkpoint.save(state, storage_writer=dcp.BucketWriter(saved), no_dist=True)
    report = import_torch_save(write(state, tmp_path / "in.pt"), place, 2)
    assert (report.keys, report.tensors, report.chunks) == (4, 3, 3)
    index, expected = dcp.read_index(place), dcp.read_index(saved)
    assert index.entries.keys() == expected.entries.keys()
    for ours, theirs in zip(index.tensors, expected.tensors, strict=True):
        assert (ours.key, ours.dtype, ours.shape) == (theirs.key, theirs.dtype, theirs.shape)
        assert [chunk.box for chunk in ours.chunks] == [chunk.box for chunk in theirs.chunks]
    zeros = torch.quantize_per_tensor(torch.zeros(4, 3), 0.1, 3, torch.qint8)
    for reader in (dcp.BucketReader(place), torch_checkpoint.FileSystemReader(place)):
        held = {"q": zeros.clone()}
        torch_checkpoint.load(held, storage_reader=reader, no_dist=True)
        assert held["q"].dequantize().equal(quantized.dequantize())


def test_import_and_export_give_back_the_file(tmp_path: Path) -> None:
    torch.manual_seed(1)
    state = {
        "model": {"w": torch.randn(7, 5), "b": torch.randn(5).bfloat16(), "empty": torch.zeros(0, 3)},
        "scalar": torch.tensor(1.5),
        "step": 12,
        "betas": (0.9, 0.95),
        "names": ["a", "b"],
        "text": "x" * 1000,
    }
    first, place, again = tmp_path / "a" / "m.pt", str(tmp_path / "step"), tmp_path / "b" / "m.pt"
    for path in (first, again):
        path.parent.mkdir()
    import_torch_save(write(state, first), place, 3)
    dcp.export(place, str(again))
    assert again.read_bytes() == first.read_bytes()


def save_trained(place: str, file: str) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(5)
    # Fewer rows than ranks, rows that do not divide, a scalar, a buffer, and one dimension.
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 2), torch.nn.Linear(2, 1)
    )
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
    sharded = get_state_dict(model, optimizer)
    whole = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    torch_checkpoint.save({"model": sharded[0], "optim": sharded[1], "step": 3}, checkpoint_id=place)
    if torch.distributed.get_rank() == 0:
        torch.save({"model": whole[0], "optim": whole[1], "step": 3}, file)


@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_are_those_that_fully_shard_saves(tmp_path: Path, ranks: int) -> None:
    saved, imported, file = tmp_path / "saved", tmp_path / "imported", str(tmp_path / "full.pt")
    run_ranks(save_trained, ranks, str(saved), file)
    import_torch_save(file, str(imported), ranks, whole=["*.running_*"])
    theirs, ours = (pickle.loads((place / ".metadata").read_bytes()) for place in (saved, imported))
    assert ours.planner_data == theirs.planner_data
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for key, entry in theirs.state_dict_metadata.items():
        mine = ours.state_dict_metadata[key]
        assert type(mine) is type(entry), key
        if isinstance(entry, TensorStorageMetadata):
            assert mine == entry, key
    for index, stored in theirs.storage_data.items():
        held = theirs.state_dict_metadata[index.fqn]
        # Of shards without elements any rank may be the one that wrote it.
        if (
            isinstance(held, TensorStorageMetadata)
            and len(held.chunks) > 1
            and index.offset[0] < held.size[0]
        ):
            assert ours.storage_data[index].relative_path[:4] == stored.relative_path[:4], index
    assert dcp.diff(str(saved), str(imported), values=True).same


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_what_cannot_be_imported_is_said(tmp_path: Path) -> None:
    place = str(tmp_path / "step")
    with pytest.raises(UsageError, match="does not hold a dict"):
        import_torch_save(write(torch.ones(2), tmp_path / "t.pt"), place)
    with pytest.raises(UsageError, match=r"state\['a'\]\['b'\] and state\['a\.b'\]"):
        import_torch_save(write({"a": {"b": 1}, "a.b": 2}, tmp_path / "d.pt"), place)
    with pytest.raises(UsageError, match=r"a key like 'none\.\*'"):
        import_torch_save(write({"w": torch.ones(2)}, tmp_path / "w.pt"), place, whole=["none.*"])
    with pytest.raises(UsageError, match="one text"):
        import_torch_save(str(tmp_path / "w.pt"), place, whole="w")
    with pytest.raises(UsageError, match="ranks"):
        import_torch_save(str(tmp_path / "d.pt"), place, 0)
    with pytest.raises(UsageError, match="not a local file"):
        import_torch_save("gs://bucket/x.pt", place)
    with pytest.raises(NotFoundError):
        import_torch_save(str(tmp_path / "absent.pt"), place)
    with pytest.raises(UsageError, match="is a directory: name the file"):
        import_torch_save(str(tmp_path), place)
    nested: Any = 1
    for _ in range(3000):
        nested = (nested,)
    sys.setrecursionlimit(20_000)
    try:
        deep = write({"deep": nested}, tmp_path / "deep.pt")
    finally:
        sys.setrecursionlimit(1000)
    with pytest.raises(SourceFileError, match=r"deep\.pt: the pickle nests deeper"):
        import_torch_save(deep, place)
    torch.save({"w": 1}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(
        UsageError, match=r"before torch 1\.6, .*: load it with torch\.load and save it again"
    ):
        import_torch_save(str(tmp_path / "old.pt"), place)
    for content, said in ((b"", "is empty"), (b"hello" * 100, "is no file that torch.save wrote")):
        (tmp_path / "other.pt").write_bytes(content)
        with pytest.raises(SourceFileError, match=said):
            import_torch_save(str(tmp_path / "other.pt"), place)
    with pytest.raises(UsageError, match=r"state\[1\] and state\['1'\]"):
        import_torch_save(write({1: 1, "1": 2}, tmp_path / "n.pt"), place)
    for name, changes in {
        "big-endian": {"byteorder": b"big"},
        r"no data\.pkl": {"data.pkl": None},
        "storage 0": {"data/0": None},
        "reaches beyond|not all": {"data/0": b"12"},
    }.items():
        with pytest.raises(CheckpointError, match=name):
            import_torch_save(rebuilt(tmp_path / "x.pt", changes), place)
    doubled = rebuilt(tmp_path / "x.pt", {}, twice="data/0")
    with pytest.raises(CheckpointError, match="damaged at entry data/0"):
        import_torch_save(doubled, place)
    with pytest.raises(CheckpointError, match="compressed"):
        import_torch_save(rebuilt(tmp_path / "x.pt", {}, method=zipfile.ZIP_DEFLATED), place)


def rebuilt(
    path: Path, changes: dict[str, bytes | None], twice: str = "", method: int = zipfile.ZIP_STORED
) -> str:
    """A file of another zip writer, with some entries changed or left out or there twice."""
    torch.save({"w": torch.arange(1000.0)}, path)
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in entries.items():
            short = name.partition("/")[2]
            changed = changes.get(short, content)
            for _ in range(2 if short == twice else 1):
                if changed is not None:
                    archive.writestr(name, changed)
    return str(path)
