"""The certificate of finished files: every tensor's digest, computed from nothing but the files.

An export reports a digest of each tensor, computed from the source's chunks. `certify` computes the same
digests from what was written; where the two are equal, the file holds what the checkpoint held. Neither
torch nor a whole file in memory is needed, and nothing in a file's pickle is executed.

`look_into` tells what a file holds without reading its tensors: `Contents`, whose ``frame`` is a digest of
all that is no tensor. `require_sound` reads a file whole, for one whose writer is not known.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import local
from typing import Any
from zipfile import BadZipFile, ZipFile, ZipInfo

from dcp.dtypes import ITEMSIZE
from dcp.errors import RecordError
from dcp.exporting.report import ExportedTensor, Format
from dcp.exporting.tensor_stream import digest_text
from dcp.pickles.nodes import Call, Value
from dcp.pickles.reader import read
from dcp.pickles.tensors import TensorNode, is_tensor, tensor_of
from dcp.safetensors_file import Stored, looks_like_safetensors, read_header
from dcp.storage import Store, open_parent
from dcp.zip_entries import is_zip

_BLOCK = 4 << 20
_THREADS = 4
_BUFFER = 1 << 16
_LOCAL = struct.Struct("<26xHH")
_END = 22
"""Bytes of the record that an archive without a comment ends with."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a finished file holds, by dotted name, and where in it."""

    format: Format
    tensors: dict[str, Stored]
    """Those that stand in C order."""
    strided: dict[str, Stored]
    """Others, as views of a transposed tensor: from their first element to their last."""
    frame: str
    """Digest of what stands around the tensors: a torch.save file's pickle, with every object; a
    safetensors file's header."""


def certify(url: str, **options: Any) -> dict[str, ExportedTensor]:
    """Tensors of a `torch.save` or safetensors file by dotted name, digested as they stand in it.

    A tensor that does not stand in C order, which no export writes, is left out.

    Args:
        url: path or URL of the file.
        options: passed to its filesystem.

    Raises:
        RecordError, PickleError: it is neither, or damaged.
        StorageError: storage failed.
    """
    store, name = open_parent(url, **options)
    return certify_object(store, name)


def certify_object(store: Store, name: str) -> dict[str, ExportedTensor]:
    """As `certify`, for an object of a store."""
    return digests(store, name, look_into(store, name).tensors)


def look_into(store: Store, name: str) -> Contents:
    """What an object holds, from its beginning or its directory alone.

    Raises:
        RecordError, PickleError: it is neither a `torch.save` nor a safetensors file, or damaged.
        StorageError: storage failed.
    """
    info = store.info(name)
    head = store.read_range(name, 0, min(10, info.size))
    if is_zip(head):
        return _in_archive(store, name, info.size)
    if looks_like_safetensors(head, info.size):
        header = store.read_range(name, 0, 8 + int.from_bytes(head[:8], "little"))
        return Contents("safetensors", read_header(store, info)[0], {}, _frame(header))
    raise RecordError(f"{name} is neither a torch.save archive nor a safetensors file", file=name)


def require_sound(store: Store, name: str) -> Contents:
    """Look into an object and hold it against itself: the CRC of every entry, or sizes without a gap.

    Raises:
        RecordError, PickleError: it is neither a `torch.save` nor a safetensors file, or damaged.
        StorageError: storage failed.
    """
    found = look_into(store, name)
    size = store.info(name).size
    if found.format == "torch":
        if store.read_range(name, max(0, size - _END), size)[:4] != b"PK\x05\x06":
            raise RecordError(f"{name} does not end as an archive does", code="records.corrupt", file=name)
        with _damage(name), ZipFile(io.BufferedReader(_Object(store, name, size), _BLOCK)) as archive:
            # torch can be told to leave CRCs out.
            wrong = archive.testzip() if any(entry.CRC for entry in archive.infolist()) else None
        if wrong is not None:
            raise RecordError(f"{name}: the CRC of {wrong} is wrong", code="records.corrupt", file=name)
        return found
    at = 8 + int.from_bytes(store.read_range(name, 0, 8), "little")
    for key, place in sorted(found.tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if place.start != at:
            raise RecordError(
                f"{name}: {key} begins at byte {place.start}, what stands before it ends at {at}",
                code="records.corrupt",
                key=key,
                file=name,
            )
        at = place.end
    if at != size:
        raise RecordError(
            f"{name} has {size} bytes, its tensors end at {at}", code="records.corrupt", file=name
        )
    return found


def _frame(data: bytes) -> str:
    import xxhash

    return digest_text(xxhash.xxh3_128(data).hexdigest())


def digests(store: Store, name: str, stored: Mapping[str, Stored]) -> dict[str, ExportedTensor]:
    """Digest byte ranges of an object, several tensors at a time, a block of each in memory."""
    own = local()

    def one(place: Stored) -> ExportedTensor:
        import xxhash

        if not hasattr(own, "buffer"):
            own.buffer = bytearray(_BLOCK)
        digest = xxhash.xxh3_128()
        for start in range(place.start, place.end, _BLOCK):
            view = memoryview(own.buffer)[: min(_BLOCK, place.end - start)]
            store.read_into(name, start, [view])
            digest.update(view)
        return ExportedTensor(
            shape=list(place.shape), dtype=place.dtype, digest=digest_text(digest.hexdigest())
        )

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="certify") as pool:
        return dict(zip(stored, pool.map(one, stored.values()), strict=True))


def _in_archive(store: Store, name: str, size: int) -> Contents:
    """What a `torch.save` archive holds."""
    with _damage(name), ZipFile(io.BufferedReader(_Object(store, name, size), _BUFFER)) as archive:
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        pickle = entries.get("data.pkl")
        # torch stores as it is; what is compressed could unfold to any size.
        if pickle is None or pickle.compress_type:
            raise RecordError(f"{name} holds no data.pkl as torch writes it", file=name)
        data = archive.read(pickle)
        placed: dict[bool, dict[str, Stored]] = {True: {}, False: {}}
        for path, node in _tensors(read(data), (), set()):
            placed[node.contiguous][path] = _placed(archive, entries, name, path, node)
        return Contents("torch", placed[True], placed[False], _frame(data))


@contextmanager
def _damage(name: str) -> Iterator[None]:
    """What `zipfile` raises over a damaged archive, as an error that names the file."""
    try:
        yield
    except (BadZipFile, struct.error, ValueError, RuntimeError, EOFError) as error:
        raise RecordError(f"{name} is damaged: {error}", code="records.corrupt", file=name) from None


def _placed(
    archive: ZipFile, entries: Mapping[str, ZipInfo], name: str, path: str, node: TensorNode
) -> Stored:
    entry = entries.get(f"data/{node.storage.key}")
    item = ITEMSIZE[node.dtype]
    begin, end = node.offset * item, node.extent * item
    if entry is None or entry.compress_type or end > entry.file_size:
        raise RecordError(f"{name}: {path} has no storage of {end} bytes", key=path, file=name)
    raw = archive.fp
    assert raw is not None
    raw.seek(entry.header_offset)
    lengths = _LOCAL.unpack(raw.read(_LOCAL.size))
    start = entry.header_offset + _LOCAL.size + sum(lengths)
    return Stored(node.dtype, node.shape, start + begin, start + end)


def _tensors(value: Value, path: tuple[str, ...], seen: set[int]) -> Iterator[tuple[str, TensorNode]]:
    """Tensors in nested dicts, lists and tuples, by dotted path; what stands in two places by the first.

    ``seen`` are the containers gone into, so that neither a circle nor a ladder of them takes for ever.
    """
    if is_tensor(value):
        yield ".".join(path), tensor_of(value)
        return
    inner: Iterable[tuple[object, Value]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    elif isinstance(value, Call) and value.calls("collections.OrderedDict"):
        inner = value.pairs
    if not inner or id(value) in seen:
        return
    seen.add(id(value))
    for key, item in inner:
        yield from _tensors(item, (*path, str(key)), seen)


class _Object(io.RawIOBase):
    """An object of a store as a file to seek in."""

    def __init__(self, store: Store, name: str, size: int) -> None:
        self._store = store
        self._name = name
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise BadZipFile(f"position {base + offset} lies before the file")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        count = max(0, min(len(view), self._size - self._at))
        if count:
            self._store.read_into(self._name, self._at, [view[:count]])
            self._at += count
        return count
