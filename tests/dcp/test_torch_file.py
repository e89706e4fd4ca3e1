import io
import os
import random
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from isal import isal_zlib

from dcp.dtypes import ITEMSIZE
from dcp.errors import UsageError
from dcp.exporting.serialization_id import serialization_id
from dcp.exporting.state import (
    Storage,
    StorageRef,
    TensorSpec,
    build_state,
    contiguous_strides,
)
from dcp.exporting.torch_file import TorchFileWriter, archive_name_for, plan_torch_file
from dcp.pickles.nodes import Value
from dcp.pickles.reader import read
from dcp.pickles.scan import globals_of
from dcp.pickles.tables import WEIGHTS_ONLY
from dcp.pickles.tensors import TYPED_STORAGES, UNTYPED_DTYPES, storage_of
from tests.support.states import Described, archive_pickle, torch_bytes, write_file, written_bytes

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{start}")
    for start in ("ComplexHalf support", "torch.quantize_per_tensor", "TypedStorage is deprecated")
]

QUANTIZED = {name for name in TYPED_STORAGES if name.startswith("q")}
DTYPES = sorted((set(TYPED_STORAGES) | UNTYPED_DTYPES) - QUANTIZED)


def _filled(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor of arbitrary bytes."""
    count = max(1, ITEMSIZE[dtype]) * torch.Size(shape).numel()
    raw = bytearray(random.Random(seed).randbytes(count))
    if dtype == "bool":
        raw = bytearray(byte & 1 for byte in raw)
    made = torch.empty(shape, dtype=getattr(torch, dtype))
    if raw:
        torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage()).copy_(
            torch.frombuffer(raw, dtype=torch.uint8)
        )
    return made


@st.composite
def _tensors(draw: Any, pool: list[torch.Tensor]) -> torch.Tensor:
    """A tensor of its own, or a view of one in the pool, or one of the pool itself."""
    match draw(st.integers(0, 3)):
        case 0:
            return draw(st.sampled_from(pool))
        case 1:
            base = draw(st.sampled_from(pool))
            if base.dim() and base.shape[0]:
                return base[draw(st.integers(0, base.shape[0] - 1)) :]
            return base
        case 2:
            base = draw(st.sampled_from(pool))
            return (
                base.conj()
                if base.is_complex() and base.dtype != torch.complex32
                else base.t()
                if base.dim() == 2
                else base
            )
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    return _filled(dtype, shape, draw(st.integers(0, 1000)))


@st.composite
def states(draw: Any) -> Any:
    pool = [
        _filled(dtype, (3, 2), seed)
        for seed, dtype in enumerate(("float32", "complex64", "int8", "float8_e5m2"))
    ]
    leaves = st.one_of(
        _tensors(pool),
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-(1 << 600), 1 << 600),
        st.floats(),
        st.complex_numbers(),
        st.text(),
        st.binary(),
        st.sampled_from(["storage", "cpu", "latin1", "0", "1", "conj"]),
    )
    keys = st.text() | st.integers() | st.sampled_from(["storage", "cpu", "weight", "0"])
    return draw(
        st.recursive(
            leaves,
            lambda inner: st.one_of(
                st.lists(inner),
                st.lists(inner, max_size=4).map(tuple),
                st.dictionaries(keys, inner),
                st.dictionaries(keys, inner).map(OrderedDict),
            ),
            max_leaves=25,
        )
    )


@settings(max_examples=150)
@given(states(), st.integers(1, 40))
def test_the_file_is_torchs_byte_for_byte(state: object, piece: int) -> None:
    assert written_bytes(state, piece=piece) == torch_bytes(state)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        raw = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in (left, right)]
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and left.stride() == right.stride()
            and raw[0].view(torch.uint8).equal(raw[1].view(torch.uint8))
            if left.dim() and left.numel()
            else left.shape == right.shape
        )
    if isinstance(left, dict):
        return list(left) == list(right) and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    return type(left) is type(right) and (left == right or left != left)


@settings(max_examples=60)
@given(states())
def test_torch_loads_it(state: object) -> None:
    data = written_bytes(state)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
    safe = WEIGHTS_ONLY.issuperset(globals_of(archive_pickle(state)))
    assert _same(state, torch.load(io.BytesIO(data), weights_only=safe))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: str, tmp_path: Path) -> None:
    shared = _filled(dtype, (5, 3), 1)
    state = {
        "whole": shared,
        "rows": shared[2:],
        "scalar": _filled(dtype, (), 2),
        "none": _filled(dtype, (0,), 3),
    }
    path, torchs = tmp_path / "model.v1.pt", tmp_path / "torch" / "model.v1.pt"
    path.write_bytes(written_bytes(state, archive_name=archive_name_for(str(path))))
    torchs.parent.mkdir()
    torch.save(state, torchs)
    assert path.read_bytes() == torchs.read_bytes()
    for options in ({}, {"mmap": True}):
        loaded = torch.load(path, weights_only=True, **options)
        assert loaded["whole"].untyped_storage().data_ptr() == loaded["rows"].untyped_storage().data_ptr()
        assert loaded["scalar"].shape == ()
        assert loaded["none"].shape == (0,)


def test_views_flags_and_ties() -> None:
    base = torch.randn(4, 6, dtype=torch.complex64)
    real = torch.randn(3, 4)
    state = {
        "tied": [real, real],
        "views": (real.t(), real[1:, ::2], real.expand(2, 3, 4), real[0, 0]),
        "conjugated": [base.conj(), base.conj().t(), torch._neg_view(base)],
        "both": torch._neg_view(base.clone()).conj(),
        "negative": torch.randn(2, dtype=torch.complex64).conj().imag,
        "trained": torch.zeros(2, requires_grad=True),
        "channels last": torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last),
    }
    assert written_bytes(state) == torch_bytes(state)


def test_attributes_of_a_state_dict() -> None:
    state = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict()
    detached = OrderedDict((key, value.detach()) for key, value in state.items())
    detached._metadata = state._metadata
    described = Described(dict(detached))
    ordered = OrderedDict(described.state)
    ordered._metadata = state._metadata
    assert write_file(build_state(ordered), described.content) == torch_bytes(detached)


@pytest.mark.parametrize(
    "count", [0, 1, 7, 8, 23, 24, 53, 54, 121, 122, 251, 252, 535, 536, 1103, 1104, 5082]
)
def test_the_identifier_for_many_records(count: int) -> None:
    """Around the sizes at which the hash table behind the identifier grows."""
    state = [torch.zeros(1, dtype=torch.uint8) for _ in range(count)]
    assert written_bytes(state) == torch_bytes(state)


def test_more_entries_than_a_plain_zip_can_count() -> None:
    records = [(str(number), bytes((number % 251,))) for number in range(66_000)]
    torchs, ours = io.BytesIO(), io.BytesIO()
    their_writer = torch._C.PyTorchFileWriter(torchs)
    for name, content in [
        ("data.pkl", b"N."),
        (".format_version", b"1"),
        (".storage_alignment", b"64"),
        ("byteorder", b"little"),
        *((f"data/{key}", content) for key, content in records),
    ]:
        their_writer.write_record(name, content, len(content))
    their_writer.write_end_of_file()
    writer = TorchFileWriter(ours, b"N.", [(key, len(content)) for key, content in records])
    for key, content in records:
        writer.write_storage(key, content)
    writer.finish()
    assert ours.getvalue() == torchs.getvalue()
    with zipfile.ZipFile(ours) as archive:
        assert len(archive.infolist()) == 66_006


def test_content_that_looks_like_a_descriptor() -> None:
    """torch takes the first eight bytes of such content for a CRC, and its identifier shows it."""
    state = [
        torch.frombuffer(bytearray(b"PK\x07\x08" + tail), dtype=torch.uint8)
        for tail in (b"", b"abc", b"abcdefg")
    ]
    for piece in (1, 3, 100):
        assert written_bytes(state, piece=piece) == torch_bytes(state)


class _Sparse:
    """A file in which large blocks, all of them zeros here, are holes."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb")

    def write(self, data: bytes | memoryview) -> int:
        if len(data) > 1 << 20:
            self.file.seek(len(data), os.SEEK_CUR)
        else:
            self.file.write(data)
        return len(data)


def test_beyond_4_gib(tmp_path: Path) -> None:
    block = memoryview(bytes(1 << 25))
    whole = len(block) * 129
    built = build_state(
        {
            "large": TensorSpec.contiguous("uint8", (whole,)),
            "empty": TensorSpec.contiguous("float32", (0,)),
            "small": TensorSpec.contiguous("uint8", (8,)),
        }
    )
    path = tmp_path / "big.pt"
    out = _Sparse(path)
    writer = TorchFileWriter(out, built.pickle, built.sizes, archive_name="big")
    crc = 0
    for _ in range(129):
        writer.write_storage("0", block)
        crc = isal_zlib.crc32(block, crc)
    writer.write_storage("2", b"8 bytes.")
    size = writer.finish()
    out.file.close()
    assert path.stat().st_size == size == writer.plan.size > 1 << 32
    with zipfile.ZipFile(path) as archive:
        large = archive.getinfo("big/data/0")
        assert (large.file_size, large.CRC) == (whole, crc)
        assert archive.getinfo("big/data/2").header_offset > 1 << 32
        assert archive.read("big/data/2") == b"8 bytes."
        assert archive.read("big/data/1") == b""
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert bytes(loaded["small"].numpy()) == b"8 bytes."
    assert loaded["large"].shape == (whole,)
    assert loaded["large"][-1] == 0


class _Last(io.BytesIO):
    """Keeps the pieces apart."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[int] = []

    def write(self, data: Any) -> int:
        self.pieces.append(len(data))
        return super().write(data)


STORAGES = [("0", 5), ("1", 0), ("2", 0), ("3", 70)]


def _writer(out: Any) -> TorchFileWriter:
    return TorchFileWriter(out, b"\x80\x02N.", STORAGES)


def test_the_plan_is_what_is_written() -> None:
    out = _Last()
    writer = _writer(out)
    writer.write_storage("0", b"abcde")
    writer.write_storage("3", bytes(70))
    writer.finish()
    data = out.getvalue()
    plan = plan_torch_file(4, STORAGES)
    assert plan == writer.plan
    assert plan.size == len(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert [f"archive/{entry.name}" for entry in plan.entries] == archive.namelist()
        for entry, info in zip(plan.entries, archive.infolist(), strict=True):
            assert (entry.header, entry.size) == (info.header_offset, info.file_size)
            assert data[entry.start : entry.start + entry.size] == archive.read(info)
            assert entry.start % 64 == 0
    assert [entry.name for entry in plan.storages] == ["data/0", "data/1", "data/2", "data/3"]
    for entry, following in zip(plan.entries, plan.entries[1:], strict=False):
        assert entry.end == following.header


@given(st.lists(st.binary(max_size=50)), st.booleans())
def test_pieces_and_checksums_from_elsewhere(pieces: list[bytes], known: bool) -> None:
    content = b"".join(pieces)
    out = io.BytesIO()
    writer = TorchFileWriter(out, b"N.", [("0", len(content))])
    for piece in pieces:
        writer.write_storage("0", memoryview(piece), isal_zlib.crc32(piece) if known else None)
    writer.finish()
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
        assert archive.read("archive/data/0") == content


def test_storages_come_in_order_and_whole() -> None:
    writer = _writer(io.BytesIO())
    with pytest.raises(UsageError, match="out of turn"):
        writer.write_storage("3", b"x")
    writer.write_storage("0", b"abc")
    with pytest.raises(UsageError, match="more were written"):
        writer.write_storage("0", b"abc")
    with pytest.raises(UsageError, match="data/0 is not complete: 3 of 5"):
        writer.finish()
    writer.write_storage("0", b"de")
    writer.write_storage("2", b"")
    with pytest.raises(UsageError, match="out of turn"):
        writer.write_storage("0", b"x")
    with pytest.raises(UsageError, match="out of turn"):
        writer.write_storage("unknown", b"x")
    writer.write_storage("3", bytes(70))
    with pytest.raises(UsageError, match="out of turn"):
        writer.write_storage("3", b"x")
    writer.finish()


def test_a_sink_that_takes_less_is_an_error() -> None:
    class Short:
        def write(self, data: bytes) -> int:
            return len(data) - 1

    with pytest.raises(UsageError, match="must take all"):
        _writer(Short())


def test_keys_come_once() -> None:
    with pytest.raises(UsageError, match="twice"):
        plan_torch_file(1, [("0", 1), ("0", 1)])


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("model.pt", "model"),
        ("a/b.c/model.v1.pt", "model.v1"),
        ("gs://bucket/run/step_5.pt", "step_5"),
        ("noending", "noending"),
        ("a/.pt.x", ".pt"),
        ("modèle.pt", "archive"),
    ],
)
def test_archive_names(path: str, name: str, tmp_path: Path) -> None:
    assert archive_name_for(path) == name
    saved = tmp_path / path.removeprefix("gs://")
    saved.parent.mkdir(parents=True, exist_ok=True)
    torch.save({}, saved)
    with zipfile.ZipFile(saved) as archive:
        assert archive.namelist()[0] == f"{name}/data.pkl"


@pytest.mark.parametrize("path", [".pt", "a/.pt", "a/", ""])
def test_paths_that_name_nothing(path: str) -> None:
    with pytest.raises(UsageError, match=r"NAME\.pt"):
        archive_name_for(path)


def test_the_identifier_has_forty_digits() -> None:
    assert serialization_id([], 0) == "0" * 40
    assert len(serialization_id(["version"], (1 << 64) - 1)) == 40


@given(st.lists(st.integers(0, 5), max_size=4))
def test_contiguous_strides_are_torchs(shape: list[int]) -> None:
    assert contiguous_strides(tuple(shape)) == torch.empty(shape).stride()


def test_values_of_other_pickles_keep_their_storages() -> None:
    """Objects read from several records, each with storages of its own, go into one file."""
    objects = [
        {"buffer": torch.arange(4.0), "again": None},
        OrderedDict(
            half=torch.ones(3, dtype=torch.float16),
            q=torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        ),
        [torch.nn.Parameter(torch.ones(2)), torch.zeros(2, dtype=torch.float8_e5m2)],
    ]
    objects[0]["again"] = objects[0]["buffer"][1:]
    content: dict[Storage, bytes] = {}

    def inert(data: bytes) -> Value:
        archive = zipfile.ZipFile(io.BytesIO(data))
        known: dict[str, Storage] = {}

        def refer(pid: Value) -> StorageRef:
            found = storage_of(pid)
            storage = known.setdefault(found.key, Storage(found.nbytes))
            content[storage] = archive.read(f"archive/data/{found.key}")
            return StorageRef(storage, found.dtype)

        return read(archive.read("archive/data.pkl"), persistent=refer)

    state = {str(number): inert(torch_bytes(value)) for number, value in enumerate(objects)}
    built = build_state(state)
    assert [key for key, _ in built.storages] == ["0", "1", "2", "3", "4"]
    loaded = torch.load(io.BytesIO(write_file(built, content)), weights_only=True)
    assert loaded["0"]["buffer"].tolist() == [0, 1, 2, 3]
    assert (
        loaded["0"]["again"].untyped_storage().data_ptr()
        == loaded["0"]["buffer"].untyped_storage().data_ptr()
    )
    assert loaded["1"]["half"].tolist() == [1, 1, 1]
    assert loaded["1"]["q"].int_repr().tolist() == [10, 10]
    assert isinstance(loaded["2"][0], torch.nn.Parameter)
    assert loaded["2"][1].dtype == torch.float8_e5m2


_FOUR = Storage(4)
UNSAVABLE: dict[str, tuple[Callable[[], Value], str]] = {
    "sub-byte dtype": (lambda: TensorSpec.contiguous("uint4", (2,)), "cannot save tensors of type uint4"),
    "two dtypes": (
        lambda: [TensorSpec.contiguous("int32", (1,), _FOUR), TensorSpec.contiguous("float32", (1,), _FOUR)],
        "both as int32 and as float32",
    ),
    "typed and untyped": (
        lambda: [StorageRef(_FOUR, None), StorageRef(_FOUR, "int8")],
        "as bytes and as int8",
    ),
    "beyond the storage": (
        lambda: TensorSpec("int8", (2, 2), _FOUR, (2, 1), offset=1),
        "5 bytes of a storage of 4",
    ),
    "other objects": (lambda: {"a": torch.zeros(1)}, "no spelling"),
}


@pytest.mark.parametrize("name", UNSAVABLE)
def test_what_torch_cannot_save_is_refused(name: str) -> None:
    make, message = UNSAVABLE[name]
    with pytest.raises(UsageError, match=message):
        build_state(make())
