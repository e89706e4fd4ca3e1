"""A `torch.save` file on local disk, as the flat values that a checkpoint would hold. Nothing in it is run.

The file is mapped, not read: a tensor's bytes are looked at when they are taken, and pages that were are
given back, so that the process does not grow with the file. Its pickle is read as inert values, and the
nested state is flattened as torch flattens it: dicts always, lists only where a tensor or a dict is in them.

Every byte is held against the file's checksums, but no byte is read for that alone where it can be avoided:
whoever takes elements tells their CRC (`TorchSource.saw`), and `TorchSource.check` puts these together.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO

import numpy as np
from isal import isal_zlib

from dcp.archive import PICKLE
from dcp.boxes import Box, Shape
from dcp.c_order import in_c_order
from dcp.dtypes import ITEMSIZE
from dcp.errors import RecordError, UsageError
from dcp.nested import Path
from dcp.pickles.graph import walk
from dcp.pickles.nodes import Call, PersistentRef, Value
from dcp.pickles.reader import read
from dcp.pickles.scan import Verdict, judge, scan
from dcp.pickles.tensors import TensorNode, is_tensor, quantized_of, storage_of, tensor_of
from dcp.storage import home_expanded
from dcp.storage.faults import calling
from dcp.zip_entries import Entry, all_entries, is_zip

BLOCK = 8 << 20
"""Bytes taken at a time, and copied where the elements do not stand in C order."""
MOST_EXPANDED = 1 << 30
"""Bytes that a tensor may have beyond its storage, of whose elements some then stand for several."""
MOST_APART = 64 << 20
"""Bytes of the file over which elements that are copied together may be strewn."""
_PICKLE_LIMIT = 1 << 30
_OLD = bytes.fromhex("8a0a6cfc9c46f9206aa85019")
"""In the head of files of before torch 1.6: the number that torch.load knows them by, pickled."""
_MAPPINGS = ("collections.OrderedDict", "collections.defaultdict")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value of the flattened state."""

    key: str
    path: Path
    """Names, as text as torch has them, and positions in lists."""
    place: Path
    """The same with the names that the dicts in the file have."""
    value: Value
    """Plain value or node."""
    tensor: TensorNode | None
    """What ``value`` is, if it is a tensor over a storage."""
    quantized: tuple[str, Shape] | None
    """Dtype and shape, if it is a quantized tensor, which has a record of its own class and no shards."""


class TorchSource:
    """An open file. Use as a context manager.

    Attributes:
        size: bytes of the file.
        leaves: its values, in the order of the state.
        dropped: keys of empty dicts, for which a checkpoint has no place.
    """

    def __init__(self, path: str, *, allow_pickle: bool = False) -> None:
        """
        Args:
            path: a local file.
            allow_pickle: take classes that are not known to be harmless too. They are copied, never run.

        Raises:
            UsageError: the path is a URL or a directory, the file holds no dict, or is of before torch 1.6.
            StorageError: the file cannot be read.
            CheckpointError: it is no `torch.save` file, is damaged, or holds a pickle that is not taken.
        """
        if "://" in path:
            raise UsageError(f"{path} is not a local file: download it first, it is mapped into memory")
        with calling(path, _open, path) as file:
            _require_zip(path, file.read(32))
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._data = memoryview(self._map)
        self._seen: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
        try:
            self.size = len(self._data)
            self._entries = all_entries(self._data)
            self._has_crc = any(entry.crc32 for entry in self._entries.values())
            state = self._state(path, allow_pickle)
            self.dropped: list[str] = []
            self.leaves = tuple(self._flattened(path, state))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TorchSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file."""
        # Views that an error's traceback still holds keep the map alive until they are gone.
        with suppress(BufferError):
            self._data.release()
            self._map.close()

    def saw(self, storage: str, start: int, size: int, crc32: int) -> None:
        """Tell the CRC of bytes ``start <= i < start + size`` of a storage, as they were taken."""
        seen = self._seen[f"data/{storage}"]
        # Of tensors that share a storage one can be a part of another.
        seen[start] = max(seen.get(start, (0, 0)), (size, crc32))

    def check(self) -> None:
        """Hold everything against the CRCs in the file; only what nobody saw is read.

        Raises:
            RecordError: ``records.corrupt``; one differs.
        """
        for entry in self._entries.values():
            self._check(entry)

    def _check(self, entry: Entry) -> None:
        if not self._has_crc:
            return
        crc = self._seen_crc(entry)
        if crc is None:
            crc = 0
            content = self._content(entry)
            for start in range(0, len(content), BLOCK):
                block = content[start : start + BLOCK]
                crc = isal_zlib.crc32(block, crc)
                self._release(entry.start + start, len(block))
        if crc != entry.crc32:
            raise RecordError(
                f"the CRC of entry {entry.name} is {crc:08x}, recorded is {entry.crc32:08x}",
                code="records.corrupt",
                entry=entry.name,
            )

    def _seen_crc(self, entry: Entry) -> int | None:
        """The CRC of an entry of which every byte was seen, in pieces that follow on each other."""
        crc = position = 0
        for start, (size, piece) in sorted(self._seen.get(entry.name, {}).items()):
            if start < position:
                continue
            if start > position:
                return None
            crc = isal_zlib.crc32_combine(crc, piece, size)
            position += size
        return crc if position == entry.size else None

    def storages(self, value: Value) -> dict[str, memoryview]:
        """Key and bytes of each storage that a value refers to."""
        found = {}
        for node in walk(value):
            if isinstance(node, PersistentRef):
                storage = storage_of(node.pid)
                found[storage.key] = self._content(self._entry(storage.key, storage.nbytes))[: storage.nbytes]
        return found

    def elements(self, tensor: TensorNode, box: Box) -> Iterator[tuple[bytes | memoryview, int | None]]:
        """Bytes in C order of some rows of a tensor, in pieces of at most `BLOCK`, and where in the storage
        they begin if they stand there as they are. ``box`` is whole in all dimensions but 0.

        A piece is to be used before the next one is asked for.
        """
        item = ITEMSIZE[tensor.dtype]
        entry = self._entry(tensor.storage.key, tensor.storage.nbytes)
        nbytes = box.volume * item
        if not nbytes:
            return
        storage = self._content(entry)[: tensor.storage.nbytes]
        first = box.offsets[0] if box.sizes else 0
        if tensor.contiguous and not tensor.conj and not tensor.neg:
            row = nbytes // box.sizes[0] if box.sizes else nbytes
            start = tensor.offset * item + first * row
            for at in range(start, start + nbytes, BLOCK):
                size = min(BLOCK, start + nbytes - at)
                yield storage[at : at + size], at
                self._release(entry.start + at, size)
            return
        offset = tensor.offset + first * (tensor.strides[0] if box.sizes else 0)
        for part in _blocks(_part(tensor, offset, box.sizes, tensor.strides)):
            yield self._copied(entry, storage, part), None

    def _copied(self, entry: Entry, storage: memoryview, part: TensorNode) -> bytes:
        """A few elements in C order, gathered from one stretch of the file after another."""
        item = ITEMSIZE[part.dtype]
        reach = [
            stride * item if size > 1 else 0 for size, stride in zip(part.shape, part.strides, strict=True)
        ]
        stretch = (part.extent - part.offset) * item
        if stretch <= MOST_APART or not any(reach):
            copied = in_c_order(storage, part)
            self._release(entry.start + part.offset * item, stretch)
            return copied
        dim = reach.index(max(reach))
        whole = np.empty(part.shape, f"V{item}")
        step = max(1, min(MOST_APART // reach[dim], part.shape[dim] // 2))
        for low in range(0, part.shape[dim], step):
            size = min(step, part.shape[dim] - low)
            shape = (*part.shape[:dim], size, *part.shape[dim + 1 :])
            piece = _part(part, part.offset + low * part.strides[dim], shape, part.strides)
            values = np.frombuffer(self._copied(entry, storage, piece), f"V{item}").reshape(shape)
            whole[(slice(None),) * dim + (slice(low, low + size),)] = values
        return whole.tobytes()

    def _release(self, start: int, size: int) -> None:
        """Give back the pages of what was looked at. Whoever looks at them again gets them again."""
        low = start // mmap.PAGESIZE * mmap.PAGESIZE
        if size > 0:
            self._map.madvise(mmap.MADV_DONTNEED, low, start + size - low)

    def _content(self, entry: Entry) -> memoryview:
        return self._data[entry.start : entry.start + (entry.size or 0)]

    def _entry(self, key: str, nbytes: int) -> Entry:
        entry = self._entries.get(f"data/{key}")
        if entry is None or entry.size is None or entry.size < nbytes:
            raise RecordError(f"the file has not all {nbytes} bytes of storage {key}", code="records.corrupt")
        return entry

    def _state(self, path: str, allow_pickle: bool) -> Value:
        entry = self._entries.get(PICKLE)
        if entry is None or entry.size is None or entry.size > _PICKLE_LIMIT:
            raise RecordError(f"{path} holds no {PICKLE}, or one beyond all measure", file=path)
        order = self._entries.get("byteorder")
        if order is not None and bytes(self._content(order)) != b"little":
            raise RecordError(f"{path} was written on a big-endian machine", file=path)
        self._check(entry)
        pickle = bytes(self._content(entry))
        found = judge(scan(pickle))
        if found.error is not None:
            raise found.error
        if found.verdict is not Verdict.ALLOWED and not allow_pickle:
            names = ", ".join((*found.reaching, *found.unknown)[:5])
            raise RecordError(
                f"{path} asks for {names}, which torch.load would refuse or run; if its origin is certain, "
                "take it with --allow-pickle (allow_pickle=True)",
                code="records.unsafe",
                file=path,
                globals=[*found.reaching, *found.unknown],
            )
        return read(pickle)

    def _flattened(self, path: str, state: Value) -> Iterator[Leaf]:
        pairs = mapping_of(state)
        if pairs is None:
            raise UsageError(f"{path} does not hold a dict, so its values have no keys: save a dict of it")
        for key, value in pairs:
            yield from self._leaves((_name(key),), (key,), value)

    def _leaves(self, path: Path, place: Path, value: Value) -> Iterator[Leaf]:
        pairs = mapping_of(value)
        if pairs is not None:
            if not pairs:
                self.dropped.append(".".join(map(str, path)))
            for key, item in pairs:
                yield from self._leaves((*path, _name(key)), (*place, key), item)
        elif isinstance(value, list) and not _is_terminal(value):
            for number, item in enumerate(value):
                yield from self._leaves((*path, number), (*place, number), item)
        else:
            key = ".".join(map(str, path))
            yield Leaf(key, path, place, value, self._tensor(key, value), quantized_of(value))

    def _tensor(self, key: str, value: Value) -> TensorNode | None:
        if not is_tensor(value):
            return None
        tensor = tensor_of(value)
        item = ITEMSIZE[tensor.dtype]
        if tensor.extent * item > tensor.storage.nbytes:
            raise RecordError(f"{key} reaches beyond its storage", code="records.corrupt", key=key)
        self._entry(tensor.storage.key, tensor.storage.nbytes)
        # A few bytes with strides of 0 can stand for any number of elements.
        nbytes = Box(tensor.shape, tensor.shape).volume * item
        if nbytes > max(tensor.storage.nbytes, MOST_EXPANDED):
            raise RecordError(
                f"{key} would be {nbytes} bytes, expanded from {tensor.storage.nbytes}: save a part of it",
                code="metadata.unsupported",
                key=key,
            )
        return tensor


def _require_zip(path: str, head: bytes) -> None:
    """The file begins as one of torch 1.6 or newer does."""
    if _OLD in head:
        raise UsageError(
            f"{path} is of the form that torch.save wrote before torch 1.6, or writes with "
            "_use_new_zipfile_serialization=False: load it with torch.load and save it again"
        )
    if not is_zip(head[:4]):
        what = "no file that torch.save wrote" if head else "empty"
        raise RecordError(f"{path} is {what}", file=path)


def _open(path: str) -> BinaryIO:
    place = home_expanded(path)
    if place.is_dir():
        raise UsageError(f"{path} is a directory: name the file in it that torch.save wrote")
    return place.open("rb")


def mapping_of(value: Value) -> list[tuple[Value, Value]] | None:
    """The items of any dict that torch flattens, a key set twice being one of them; None if it is no dict."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, Call) and any(value.calls(name) for name in _MAPPINGS):
        return list(dict(value.pairs).items())
    return None


def _is_terminal(value: list[Value]) -> bool:
    """Whether torch saves a list as one object."""
    for entry in value:
        if mapping_of(entry) is not None or is_tensor(entry) or quantized_of(entry) is not None:
            return False
        if isinstance(entry, list) and not _is_terminal(entry):
            return False
    return True


def _name(key: Value) -> str:
    if not isinstance(key, str | int | float | bool | None):
        raise UsageError(f"a dict in the file has a key of type {type(key).__name__}, which is no name")
    return str(key)


def _blocks(tensor: TensorNode) -> Iterator[TensorNode]:
    """Parts of at most `BLOCK`, one after another in C order."""
    nbytes = Box(tensor.shape, tensor.shape).volume * ITEMSIZE[tensor.dtype]
    if nbytes <= BLOCK or not tensor.shape:
        yield tensor
        return
    rows, stride = tensor.shape[0], tensor.strides[0]
    step = BLOCK * rows // nbytes
    for low in range(0, rows, max(1, step)):
        offset = tensor.offset + low * stride
        if step:
            shape = (min(step, rows - low), *tensor.shape[1:])
            yield _part(tensor, offset, shape, tensor.strides)
        else:
            yield from _blocks(_part(tensor, offset, tensor.shape[1:], tensor.strides[1:]))


def _part(tensor: TensorNode, offset: int, shape: Shape, strides: Shape) -> TensorNode:
    return TensorNode(tensor.storage, tensor.dtype, offset, shape, strides, conj=tensor.conj, neg=tensor.neg)
