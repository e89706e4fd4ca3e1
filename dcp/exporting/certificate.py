"""The certificate of finished files: every tensor's digest, computed from nothing but the files.

An export reports a digest of each tensor, computed from the source's chunks. `certify` computes the same
digests from what was written; where the two are equal, the file holds what the checkpoint held. Neither
torch nor a whole file in memory is needed, and nothing in a file's pickle is executed.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import local
from typing import Any
from zipfile import BadZipFile, ZipFile, ZipInfo

from dcp.dtypes import ITEMSIZE
from dcp.errors import RecordError
from dcp.exporting.report import ExportedTensor
from dcp.exporting.tensor_stream import digest_text
from dcp.pickles.nodes import Value
from dcp.pickles.reader import read
from dcp.pickles.tensors import TensorNode, is_tensor, tensor_of
from dcp.safetensors_file import Stored, looks_like_safetensors, read_header
from dcp.storage import Store, open_parent
from dcp.zip_entries import is_zip

_BLOCK = 4 << 20
_THREADS = 4
_BUFFER = 1 << 16
_LOCAL = struct.Struct("<26xHH")


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
    info = store.info(name)
    head = store.read_range(name, 0, min(10, info.size))
    if is_zip(head):
        return digests(store, name, _in_archive(store, name, info.size))
    if looks_like_safetensors(head, info.size):
        return digests(store, name, read_header(store, info)[0])
    raise RecordError(f"{name} is neither a torch.save archive nor a safetensors file", file=name)


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


def _in_archive(store: Store, name: str, size: int) -> dict[str, Stored]:
    """Where the tensors of a `torch.save` archive stand."""
    try:
        with ZipFile(io.BufferedReader(_Object(store, name, size), _BUFFER)) as archive:
            entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            pickle = entries.get("data.pkl")
            # torch stores as it is; what is compressed could unfold to any size.
            if pickle is None or pickle.compress_type:
                raise RecordError(f"{name} holds no data.pkl as torch writes it", file=name)
            value = read(archive.read(pickle))
            tensors = {path: node for path, node in _tensors(value, "") if node.contiguous}
            return {path: _placed(archive, entries, name, path, node) for path, node in tensors.items()}
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


def _tensors(value: Value, path: str) -> Iterator[tuple[str, TensorNode]]:
    """Tensors in nested dicts and lists, by dotted path."""
    if is_tensor(value):
        yield path, tensor_of(value)
        return
    inner: Iterable[tuple[object, Value]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    for key, item in inner:
        yield from _tensors(item, f"{path}.{key}" if path else str(key))


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
