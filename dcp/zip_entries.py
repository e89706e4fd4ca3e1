"""The zip archive that `torch.save` makes of one value, read from either end.

torch streams its archives: local headers carry no sizes, and a data descriptor follows each entry. So the
first bytes of a record already tell where its tensor data begins (`front_entries`), without the central
directory at the other end, and the descriptor behind the data tells its CRC (`descriptor`).
`all_entries` reads the directory of a whole record; `check_rest` holds what stands behind the data
against the front. Offsets count from the record's first byte.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dcp.errors import RecordError

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_DESCRIPTOR = b"PK\x07\x08"
_STREAMED = 0x08
_WIDE = 0xFFFFFFFF
DESCRIPTOR_MAX = 24
"""Most bytes a data descriptor takes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored entry: bytes ``start <= i < start + size`` of the record."""

    name: str
    """Without the archive's own first directory: ``data.pkl``, ``data/0``, ``byteorder``, ..."""
    header: int
    """First byte of the local header, from the record's first byte."""
    start: int
    """First byte of the content, from the record's first byte."""
    size: int | None
    """Bytes; None where only the front of the record is known and nothing there says."""
    crc32: int | None
    """CRC-32 recorded for the content; None where it is not known yet."""


def is_zip(head: bytes) -> bool:
    """Whether bytes begin a zip archive."""
    return head[:4] == b"PK\x03\x04"


def front_entries(head: bytes) -> Iterator[Entry]:
    """Entries in order, as far as ``head``, the first bytes of a record, reaches.

    The last one yielded may have no size: its content goes on beyond ``head``.
    """
    position = 0
    while len(head) >= position + _LOCAL.size and is_zip(head[position : position + 4]):
        fields = _LOCAL.unpack_from(head, position)
        flags, method, crc, size = fields[2], fields[3], fields[6], fields[8]
        name_start = position + _LOCAL.size
        start = name_start + fields[9] + fields[10]
        name = _name(head[name_start : name_start + fields[9]])
        if method != 0:
            raise RecordError(f"entry {name} is compressed; torch stores entries as they are")
        if not flags & _STREAMED:
            yield Entry(name, position, start, size, crc)
            position = start + size
            continue
        found = _find_descriptor(head, start)
        if found is None:
            yield Entry(name, position, start, None, None)
            return
        size, crc, width = found
        yield Entry(name, position, start, size, crc)
        position = start + size + width


def _find_descriptor(head: bytes, start: int) -> tuple[int, int, int] | None:
    """(size, crc, descriptor width) of the streamed entry at ``start``, recognised by its own size."""
    at = head.find(_DESCRIPTOR, start)
    while at >= 0:
        found = descriptor(head[at : at + DESCRIPTOR_MAX], at - start)
        if found is not None:
            return at - start, *found
        at = head.find(_DESCRIPTOR, at + 1)
    return None


def descriptor(data: bytes, size: int) -> tuple[int, int] | None:
    """(crc, width in bytes) if ``data`` begins with the data descriptor of a ``size``-byte entry."""
    if data[:4] != _DESCRIPTOR:
        return None
    if len(data) >= 16 and size < _WIDE:
        crc, packed, plain = struct.unpack_from("<III", data, 4)
        if packed == plain == size:
            return crc, 16
    if len(data) >= 24:
        crc, packed, plain = struct.unpack_from("<IQQ", data, 4)
        if packed == plain == size:
            return crc, 24
    return None


def all_entries(record: bytes | memoryview) -> dict[str, Entry]:
    """Every entry of a whole record, from its central directory.

    Raises:
        RecordError: the directory is damaged or places an entry outside the record.
    """
    window = _Window(memoryview(record), 0)
    return {entry.name: entry for entry in _directory(window)}


def check_rest(rest: bytes, start: int, front: Mapping[str, Entry]) -> None:
    """Hold the end of a record against its front: directory, CRCs, and entries behind the tensor's data.

    Args:
        rest: the record's bytes from offset ``start`` to its end.
        start: where they begin, in bytes from the record's first byte.
        front: entries found at the front, by name; those with a CRC are compared.

    Raises:
        RecordError: ``records.corrupt``.
    """
    from isal import isal_zlib

    window = _Window(memoryview(rest), start)
    listed = {entry.name: entry for entry in _directory(window, front)}
    for name, entry in front.items():
        told = listed.get(name)
        if (
            told is None
            or (entry.crc32 is not None and told.crc32 != entry.crc32)
            or told.start != entry.start
        ):
            raise RecordError(
                f"the archive's directory does not agree on entry {name}", code="records.corrupt"
            )
    has_crc = any(entry.crc32 for entry in listed.values())
    for entry in listed.values():
        if has_crc and entry.start >= start and entry.size is not None:
            actual = isal_zlib.crc32(window.content(entry.start, entry.size))
            if actual != entry.crc32:
                raise RecordError(f"the CRC of entry {entry.name} is wrong", code="records.corrupt")


@dataclass(frozen=True, slots=True)
class _Window:
    """Part of a record: ``data[0]`` is its byte ``base``."""

    data: memoryview
    base: int

    @property
    def end(self) -> int:
        return self.base + len(self.data)

    def unpack(self, layout: struct.Struct, at: int) -> tuple[Any, ...]:
        return layout.unpack(self.content(at, layout.size))

    def content(self, at: int, size: int) -> memoryview:
        first = at - self.base
        if first < 0 or size < 0 or first + size > len(self.data):
            raise RecordError("the archive's directory is damaged", code="records.corrupt")
        return self.data[first : first + size]


def _directory(window: _Window, front: Mapping[str, Entry] | None = None) -> Iterator[Entry]:
    """Entries in the order of the central directory; those before the window are looked up in ``front``."""
    end_at = window.end - _END.size
    fields = window.unpack(_END, end_at)
    if fields[0] != b"PK\x05\x06":
        raise RecordError("the archive does not end with a directory", code="records.corrupt")
    count, at = fields[4], fields[6]
    locator_at = end_at - _LOCATOR64.size
    if locator_at >= window.base and bytes(window.content(locator_at, 4)) == b"PK\x06\x07":
        end64 = window.unpack(_END64, window.unpack(_LOCATOR64, locator_at)[2])
        if end64[0] != b"PK\x06\x06":
            raise RecordError("the archive's wide directory end is damaged", code="records.corrupt")
        count, at = end64[7], end64[9]
    directory_at = at
    for _ in range(count):
        fields = window.unpack(_CENTRAL, at)
        if fields[0] != b"PK\x01\x02":
            raise RecordError("the archive's directory is damaged", code="records.corrupt")
        name_at = at + _CENTRAL.size
        name = _name(bytes(window.content(name_at, fields[10])))
        extra = bytes(window.content(name_at + fields[10], fields[11]))
        size, header = _widen(extra, fields[8], fields[9], fields[16])
        if fields[4] != 0:
            raise RecordError(f"entry {name} is compressed; torch stores entries as they are")
        known = front.get(name) if front is not None else None
        if known is not None:
            if known.header != header or known.size not in (None, size):
                raise RecordError(f"the archive's directory misplaces entry {name}", code="records.corrupt")
            start = known.start
        else:
            local = window.unpack(_LOCAL, header)
            start = header + _LOCAL.size + local[9] + local[10]
            if local[0] != b"PK\x03\x04":
                raise RecordError(f"the archive's directory misplaces entry {name}", code="records.corrupt")
        if start + size > directory_at:
            raise RecordError(f"entry {name} lies outside the archive", code="records.corrupt")
        yield Entry(name, header, start, size, fields[7])
        at = name_at + fields[10] + fields[11] + fields[12]


def _widen(extra: bytes, packed: int, size: int, offset: int) -> tuple[int, int]:
    """Size and offset of a directory entry, from its zip64 field where the short ones are full."""
    if _WIDE not in (packed, size, offset):
        return size, offset
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            values = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            size = next(values, size) if size == _WIDE else size
            packed = next(values, packed) if packed == _WIDE else packed
            return size, next(values, offset) if offset == _WIDE else offset
        at += 4 + length
    return size, offset


def _name(raw: bytes) -> str:
    """An entry's name below the archive's root directory."""
    return raw.decode("utf-8", "replace").partition("/")[2]
