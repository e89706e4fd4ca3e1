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
from dcp.zip_format import CENTRAL, DESCRIPTOR, END, END64, LOCAL, LOCATOR64, STREAMED, UTF8, WIDE

_VERSIONS = frozenset({"version", ".data/version"})
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
    while len(head) >= position + LOCAL.size and is_zip(head[position : position + 4]):
        fields = LOCAL.unpack_from(head, position)
        flags, method, crc, size = fields[2], fields[3], fields[6], fields[8]
        name_start = position + LOCAL.size
        start = name_start + fields[9] + fields[10]
        name = _name(head[name_start : name_start + fields[9]])
        if method != 0:
            raise RecordError(f"entry {name} is compressed; torch stores entries as they are")
        if not flags & STREAMED:
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
    at = head.find(DESCRIPTOR, start)
    while at >= 0:
        found = descriptor(head[at : at + DESCRIPTOR_MAX], at - start)
        if found is not None:
            return at - start, *found
        at = head.find(DESCRIPTOR, at + 1)
    return None


def descriptor(data: bytes, size: int) -> tuple[int, int] | None:
    """(crc, width in bytes) if ``data`` begins with the data descriptor of a ``size``-byte entry."""
    if data[:4] != DESCRIPTOR:
        return None
    if len(data) >= 16 and size < WIDE:
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
            behind = window.content(entry.start + entry.size, 4)
            if actual != entry.crc32 or (behind == DESCRIPTOR and not window.describes(entry)):
                raise RecordError(f"the CRC of entry {entry.name} is wrong", code="records.corrupt")


@dataclass(frozen=True, slots=True)
class _Window:
    """Part of a record: ``data[0]`` is its byte ``base``."""

    data: memoryview
    base: int

    @property
    def end(self) -> int:
        return self.base + len(self.data)

    def describes(self, entry: Entry) -> bool:
        """Whether the data descriptor behind an entry says what the directory says."""
        size = entry.size or 0
        at = entry.start + size
        told = descriptor(bytes(self.content(at, min(DESCRIPTOR_MAX, self.end - at))), size)
        return told is not None and told[0] == entry.crc32

    def unpack(self, layout: struct.Struct, at: int) -> tuple[Any, ...]:
        return layout.unpack(self.content(at, layout.size))

    def content(self, at: int, size: int) -> memoryview:
        first = at - self.base
        if first < 0 or size < 0 or first + size > len(self.data):
            raise RecordError("the archive's directory is damaged", code="records.corrupt")
        return self.data[first : first + size]


def _directory(window: _Window, front: Mapping[str, Entry] | None = None) -> Iterator[Entry]:
    """Entries in the order of the central directory; those before the window are looked up in ``front``.

    Strict where torch's reader is: a field that it would stumble over is damage, whatever the data is like.
    """
    count, directory_at, directory_end = _directory_place(window)
    at = directory_at
    roots: set[bytes] = set()
    names: set[str] = set()
    for _ in range(count):
        fields = window.unpack(CENTRAL, at)
        _require(fields[0] == b"PK\x01\x02" and fields[13] == 0 and not fields[3] & ~(STREAMED | UTF8))
        name_at = at + CENTRAL.size
        raw = bytes(window.content(name_at, fields[10]))
        roots.add(raw.partition(b"/")[0])
        name = _name(raw)
        _require(name not in names, name)
        names.add(name)
        extra = bytes(window.content(name_at + fields[10], fields[11]))
        size, packed, header = _widen(extra, fields[9], fields[8], fields[16])
        if fields[4] != 0:
            raise RecordError(f"entry {name} is compressed; torch stores entries as they are")
        known = front.get(name) if front is not None else None
        if known is not None:
            _require(known.header == header and known.size in (None, size), name)
            start = known.start
        else:
            local = window.unpack(LOCAL, header)
            _require(local[0] == b"PK\x03\x04" and local[2] == fields[3], name)
            _require(bytes(window.content(header + LOCAL.size, local[9])) == raw, name)
            start = header + LOCAL.size + local[9] + local[10]
        _require(packed == size and start + size <= directory_at, name)
        yield Entry(name, header, start, size, fields[7])
        at = name_at + fields[10] + fields[11] + fields[12]
    _require(at == directory_end and len(roots) <= 1)
    _require(not _VERSIONS.isdisjoint(names), "version")


def _directory_place(window: _Window) -> tuple[int, int, int]:
    """Number of entries, and where the central directory begins and ends."""
    end_at = window.end - END.size
    signature, disk, first_disk, here, count, size, at, comment = window.unpack(END, end_at)
    _require(signature == b"PK\x05\x06" and disk == first_disk == comment == 0 and here == count)
    locator_at = end_at - LOCATOR64.size
    if locator_at < window.base or bytes(window.content(locator_at, 4)) != b"PK\x06\x07":
        _require(at + size == end_at)
        return count, at, end_at
    _, disk, end64_at, disks = window.unpack(LOCATOR64, locator_at)
    end64 = window.unpack(END64, end64_at)
    _require(end64[0] == b"PK\x06\x06" and disk == end64[4] == end64[5] == 0 and disks == 1)
    wide_count, wide_size, wide_at = end64[7], end64[8], end64[9]
    _require(end64[6] == wide_count and wide_at + wide_size == end64_at)
    _require(count in (wide_count, 0xFFFF) and size in (wide_size, WIDE) and at in (wide_at, WIDE))
    return wide_count, wide_at, end64_at


def _require(fact: bool, name: str | None = None) -> None:
    if not fact:
        where = "" if name is None else f" at entry {name}"
        raise RecordError(f"the archive's directory is damaged{where}", code="records.corrupt")


def _widen(extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """A directory entry's numbers, from its zip64 field where the short ones are full."""
    at = 0
    while WIDE in (size, packed, header) and at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1 and at + 4 + length <= len(extra):
            values = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            size, packed, header = (next(values, n) if n == WIDE else n for n in (size, packed, header))
            break
        at += 4 + length
    return size, packed, header


def _name(raw: bytes) -> str:
    """An entry's name below the archive's root directory."""
    try:
        return raw.decode().partition("/")[2]
    except UnicodeDecodeError:
        raise RecordError("the name of an entry is not text", code="records.corrupt") from None
