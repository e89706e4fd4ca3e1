"""Inside one record: where a chunk's raw bytes stand, and how to get them when they do not stand plainly.

A tensor's record is a small `torch.save` archive. Usually the chunk's elements stand in it contiguous and
in C order, so that once its head is read (`Records.locate`) any rows of it are one byte range of the
object. A record that is compressed, strided or lazily conjugated is decoded whole (`Records.read_chunk`).
A `.distcp` that is one safetensors file is located by its own header.

Every number in a record is held against the index and the object's real size before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from dcp.archive import PICKLE, Archive, open_archive
from dcp.boxes import Shape
from dcp.c_order import in_c_order
from dcp.dtypes import ITEMSIZE
from dcp.errors import CheckpointError, PickleError, RecordError
from dcp.index import Chunk, ObjectEntry, TensorEntry
from dcp.pickles.nodes import Value
from dcp.pickles.reader import read
from dcp.pickles.tensors import TensorNode, is_tensor, tensor_of
from dcp.record import Record
from dcp.safetensors_file import Stored, looks_like_safetensors, read_header
from dcp.storage import ByteRange, ObjectInfo, Store, is_safe_name
from dcp.zip_entries import Entry, check_rest, descriptor, front_entries, is_zip

if TYPE_CHECKING:
    from dcp.findings import Code

HEAD = 4096
"""Bytes read to find where a record's data begins; torch's own heads end at 704 or earlier."""
TAIL_LIMIT = 1 << 20
"""Most bytes behind a tensor's data in its record; torch writes less than a thousand."""
OBJECT_LIMIT = 1 << 30
"""Largest pickled object decoded, in bytes."""
_SHORTEST_HEAD = 16
_ZSTD = "stream.zstd"
_ZSTD_VERSION = "1"
"""The only one that torch reads, whatever stands behind its dot."""
_DECODE_SLACK = 1 << 20


@dataclass(frozen=True, slots=True)
class Located:
    """Where a chunk's bytes stand. Offsets are absolute within the object ``name``, in bytes."""

    entry: TensorEntry
    chunk: Chunk
    name: str
    start: int
    """First byte of the chunk's elements; meaningful only if ``direct``."""
    nbytes: int
    """Bytes of the chunk in C order."""
    direct: bool
    """Whether bytes ``start <= i < start + nbytes`` are the chunk in C order."""
    checkable: bool
    """Whether a CRC is recorded right behind these very bytes; see `guarded`."""
    front: Mapping[str, Entry] = field(default_factory=dict, repr=False)
    """Entries of the record's archive as its head tells them."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row along dimension 0; the whole chunk for a scalar."""
        return prod(self.chunk.box.sizes[1:]) * ITEMSIZE[self.entry.dtype]

    def rows(self, first: int, last: int) -> ByteRange:
        """Byte range of rows ``first <= r < last`` along dimension 0 of a direct chunk."""
        return ByteRange(self.name, self.start + first * self.row_bytes, self.start + last * self.row_bytes)

    @property
    def whole(self) -> ByteRange:
        """Byte range of all elements of a direct chunk."""
        return ByteRange(self.name, self.start, self.start + self.nbytes)

    @property
    def guarded(self) -> ByteRange:
        """The elements of a checkable chunk and all of the record behind them, for `verify`."""
        record = self.chunk.record
        assert record is not None
        return ByteRange(self.name, self.start, record.end)

    def verify(self, tail: bytes, crc32: int) -> None:
        """Hold a CRC computed over the elements against the recorded one.

        Args:
            tail: the bytes that follow the elements, to the record's end.
            crc32: of the elements.

        Raises:
            RecordError: ``records.corrupt``.
        """
        found = descriptor(tail, self.nbytes)
        if found is None:
            raise self.fault("the data descriptor behind the tensor is damaged", code="records.corrupt")
        if found[0] != crc32:
            raise self.fault(
                f"the CRC of its bytes is {crc32:08x}, recorded is {found[0]:08x}",
                code="records.corrupt",
                expected=found[0],
                actual=crc32,
            )
        record = self.chunk.record
        assert record is not None
        try:
            check_rest(tail, self.start + self.nbytes - record.offset, self.front)
        except RecordError as error:
            raise self.fault(str(error), code=error.code) from None

    def fault(self, why: str, code: Code = "records.undecodable", **facts: object) -> RecordError:
        """An error about this chunk."""
        return fault(self.entry, self.chunk.record, why, chunk=self.chunk, code=code, facts=facts)


def fault(
    entry: TensorEntry | ObjectEntry,
    record: Record | None,
    why: str,
    *,
    chunk: Chunk | None = None,
    code: Code = "records.undecodable",
    facts: Mapping[str, object] | None = None,
) -> RecordError:
    """A `RecordError` that names key, chunk, file and byte range; ``facts`` go into its detail."""
    where = f"{entry.key} {chunk.box}" if chunk is not None else entry.key
    error = RecordError(why, code=code, key=entry.key, file=None if record is None else record.path)
    error.detail.update(facts or {})
    if chunk is not None:
        error.detail |= {"offsets": list(chunk.box.offsets), "sizes": list(chunk.box.sizes)}
    if record is not None:
        error.detail = {"offset": record.offset, "length": record.length, **error.detail}
        why = f"{why} ({record.path}, bytes {record.offset} to {record.end})"
    error.args = (f"{where}: {why}",)
    return error


class Records:
    """Reads the records of one checkpoint."""

    def __init__(self, store: Store, objects: Mapping[str, ObjectInfo]) -> None:
        self.store = store
        self.objects = objects
        self._safetensors: dict[tuple[str, int], dict[str, Stored]] = {}
        self._tensors: dict[bytes, TensorNode] = {}

    def locate(self, entry: TensorEntry, chunk: Chunk) -> Located:
        """Find where a chunk's bytes stand, reading the head of its record.

        Raises:
            RecordError: the record is missing, undecodable or does not fit the index.
            CheckpointError: its file is missing, cut off or outside the checkpoint.
        """
        record = self._bounded(entry, chunk.record, chunk)
        nbytes = chunk.box.volume * ITEMSIZE[entry.dtype]
        if record.transforms:
            return Located(entry, chunk, record.path, record.offset, nbytes, direct=False, checkable=False)
        # In a safetensors file a record's length is the tensor's, which may be shorter than any header.
        end = record.offset + min(HEAD, max(record.length, _SHORTEST_HEAD))
        head = self.store.read_range(record.path, record.offset, min(end, self.objects[record.path].size))
        if is_zip(head):
            return self._in_archive(entry, chunk, record, head, nbytes)
        if looks_like_safetensors(head, self.objects[record.path].size - record.offset):
            return self._in_safetensors(entry, chunk, record, nbytes)
        why = f"neither a torch archive nor a safetensors file; its first bytes are {head[:4].hex()}"
        raise fault(entry, record, why, chunk=chunk)

    def read_chunk(self, entry: TensorEntry, chunk: Chunk) -> bytes:
        """A whole chunk in C order, whatever its encoding, its CRC checked where there is one.

        Raises:
            RecordError, CheckpointError: as `locate`, and ``records.corrupt``.
        """
        located = self.locate(entry, chunk)
        if located.direct:
            return self._read_direct(located)
        return self._decode(located)

    def read_object(self, entry: ObjectEntry) -> Archive:
        """A pickled object's archive, decoded and with its CRCs checked.

        Raises:
            RecordError, CheckpointError: it is missing, too large, or no torch archive.
        """
        record = self._bounded(entry, entry.record, None)
        if record.length > OBJECT_LIMIT:
            raise fault(entry, record, f"an object of more than {OBJECT_LIMIT} bytes")
        data = self._plain(entry, record, OBJECT_LIMIT)
        try:
            return open_archive(data)
        except CheckpointError as error:
            raise fault(entry, record, str(error), code=error.code, facts=error.detail) from None

    def _bounded(
        self, entry: TensorEntry | ObjectEntry, record: Record | None, chunk: Chunk | None
    ) -> Record:
        """The record, if its file is the checkpoint's own and holds its whole range."""
        if record is None:
            raise fault(entry, None, "no bytes are recorded for it", chunk=chunk, code="records.missing")
        if not is_safe_name(record.path):
            raise fault(entry, record, "its file is not inside the checkpoint", code="files.unsafe-path")
        info = self.objects.get(record.path)
        if info is None:
            raise fault(entry, record, "its file does not exist", code="files.missing")
        empty = chunk is not None and not chunk.box.volume
        if record.offset < 0 or record.length < (0 if empty else 1):
            raise fault(entry, record, "its byte range makes no sense", code="records.out-of-bounds")
        if record.end > info.size:
            raise fault(
                entry,
                record,
                f"its file is only {info.size} bytes",
                code="files.truncated",
                facts={"actual": info.size},
            )
        return record

    def _in_archive(
        self, entry: TensorEntry, chunk: Chunk, record: Record, head: bytes, nbytes: int
    ) -> Located:
        entries: dict[str, Entry] = {}
        try:
            for found in front_entries(head):
                entries[found.name] = found
                if found.name.startswith("data/"):
                    break
            _check_front(head, entries)
            tensor = self._tensor(entry, chunk, record, head, entries)
        except (PickleError, RecordError) as error:
            if error.key is not None:
                raise
            raise fault(entry, record, str(error), chunk=chunk, code=error.code) from None
        data = entries.get(f"data/{tensor.storage.key}")
        if data is None and tensor.storage.nbytes == 0:
            return Located(entry, chunk, record.path, record.offset, nbytes, direct=True, checkable=False)
        if data is None:
            # The storage does not begin within the head: some other writer's order of entries.
            return Located(entry, chunk, record.path, record.offset, nbytes, direct=False, checkable=False)
        size = tensor.storage.nbytes
        if (data.size is not None and data.size != size) or data.start + size > record.length:
            raise fault(
                entry, record, f"its storage is not the {size} bytes its pickle says", chunk=chunk,
                code="records.mismatch", facts={"expected": size, "actual": data.size},
            )  # fmt: skip
        if tensor.extent * ITEMSIZE[tensor.dtype] > size:
            raise fault(
                entry, record, "its elements lie beyond its storage", chunk=chunk, code="records.mismatch"
            )
        if record.length - (data.start + size) > TAIL_LIMIT:
            raise fault(
                entry, record, "something else stands behind its data", chunk=chunk, code="records.mismatch"
            )
        start = record.offset + data.start + tensor.offset * ITEMSIZE[tensor.dtype]
        return Located(
            entry,
            chunk,
            record.path,
            start,
            nbytes,
            direct=tensor.contiguous and not tensor.conj and not tensor.neg,
            checkable=size == nbytes > 0 and bool(entries[PICKLE].crc32),
            front=entries,
        )

    def _tensor(
        self, entry: TensorEntry, chunk: Chunk, record: Record, head: bytes, entries: Mapping[str, Entry]
    ) -> TensorNode:
        """The tensor a head describes, held against the index."""
        found = entries.get(PICKLE)
        if found is None or found.size is None:
            raise fault(entry, record, "its archive does not begin with a pickle", chunk=chunk)
        pickle = head[found.start : found.start + found.size]
        tensor = self._tensors.get(pickle)
        if tensor is None:
            tensor = _read_tensor(read(pickle))
            self._tensors[pickle] = tensor
        _require(entry, chunk, record, tensor)
        return tensor

    def _in_safetensors(self, entry: TensorEntry, chunk: Chunk, record: Record, nbytes: int) -> Located:
        place = (record.path, record.offset)
        if place not in self._safetensors:
            self._safetensors[place], _ = read_header(self.store, self.objects[record.path], record.offset)
        stored = self._safetensors[place].get(entry.key)
        if stored is None:
            raise fault(entry, record, "the safetensors file does not hold it", code="records.mismatch")
        _require(entry, chunk, record, stored)
        return Located(entry, chunk, record.path, stored.start, nbytes, direct=True, checkable=False)

    def _read_direct(self, located: Located) -> bytes:
        if not located.checkable:
            item = located.whole
            return self.store.read_range(item.name, item.start, item.end)
        from isal import isal_zlib

        item = located.guarded
        data = self.store.read_range(item.name, item.start, item.end)
        content = data[: located.nbytes]
        located.verify(data[located.nbytes :], isal_zlib.crc32(content))
        return content

    def _decode(self, located: Located) -> bytes:
        entry, chunk = located.entry, located.chunk
        record = self._bounded(entry, chunk.record, chunk)
        data = self._plain(entry, record, located.nbytes + _DECODE_SLACK)
        try:
            archive = open_archive(data)
            tensor = _read_tensor(archive.value)
            storage = archive.storage(tensor.storage.key) if tensor.storage.nbytes else memoryview(b"")
        except CheckpointError as error:
            raise fault(entry, record, str(error), chunk=chunk, code=error.code, facts=error.detail) from None
        _require(entry, chunk, record, tensor)
        if len(storage) != tensor.storage.nbytes or tensor.extent * ITEMSIZE[tensor.dtype] > len(storage):
            raise fault(
                entry, record, "its elements lie beyond its storage", chunk=chunk, code="records.mismatch"
            )
        return in_c_order(storage, tensor)

    def _plain(self, entry: TensorEntry | ObjectEntry, record: Record, limit: int) -> bytes:
        """A record's bytes with its stream transforms undone; ``limit`` bounds what they may grow to."""
        data = self.store.read_range(record.path, record.offset, record.end)
        for transform in record.transforms:
            name, _, version = transform.partition("/")
            if name != _ZSTD or version.partition(".")[0] != _ZSTD_VERSION:
                raise fault(entry, record, f"transform {transform!r} is not known here")
            data = self._unzstd(entry, record, data, limit)
        return data

    def _unzstd(self, entry: TensorEntry | ObjectEntry, record: Record, data: bytes, limit: int) -> bytes:
        import zstandard

        try:
            stream = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True)
            decoded: bytes = stream.read(limit + 1)
        except zstandard.ZstdError as error:
            raise fault(entry, record, f"not a zstd stream: {error}", code="records.corrupt") from None
        if len(decoded) > limit:
            raise fault(entry, record, f"it decodes to more than {limit} bytes", code="records.mismatch")
        return decoded


def _check_front(head: bytes, entries: Mapping[str, Entry]) -> None:
    """CRCs of the small entries before the tensor's data, if the record has CRCs at all."""
    from isal import isal_zlib

    if PICKLE not in entries or not entries[PICKLE].crc32:
        return
    for name, entry in entries.items():
        if entry.size is None or name.startswith("data/"):
            continue
        if isal_zlib.crc32(head[entry.start : entry.start + entry.size]) != entry.crc32:
            raise RecordError(f"the CRC of entry {name} is wrong", code="records.corrupt")
    order = entries.get("byteorder")
    if order is not None and head[order.start : order.start + (order.size or 0)] != b"little":
        raise RecordError("the archive was written on a big-endian machine")


def _read_tensor(value: Value) -> TensorNode:
    if not is_tensor(value):
        made_by = getattr(value, "func", type(value).__name__)
        raise PickleError(f"it is not a plain tensor but made by {made_by}", code="records.undecodable")
    tensor = tensor_of(value)
    if tensor.dtype not in ITEMSIZE or any("_rebuild_parameter" not in name for name in tensor.wrapping):
        raise PickleError(
            f"it is not a plain tensor but {', '.join(tensor.wrapping) or tensor.dtype}",
            code="records.undecodable",
        )
    return tensor


def _require(entry: TensorEntry, chunk: Chunk, record: Record, tensor: TensorNode | Stored) -> None:
    """Hold what a record says of itself against the index."""
    if (tensor.dtype, tensor.shape) != (entry.dtype, chunk.box.sizes):
        raise fault(
            entry,
            record,
            f"it holds {tensor.dtype} {list(tensor.shape)}, the index says {entry.dtype} "
            f"{list(chunk.box.sizes)}",
            chunk=chunk,
            code="records.mismatch",
            facts=_disagreement(entry, chunk, tensor.dtype, tensor.shape),
        )


def _disagreement(entry: TensorEntry, chunk: Chunk, dtype: str, shape: Shape) -> dict[str, object]:
    return {
        "expected": {"dtype": entry.dtype, "shape": list(chunk.box.sizes)},
        "actual": {"dtype": dtype, "shape": list(shape)},
    }
