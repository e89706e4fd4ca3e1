"""A `torch.save` file, streamed in order to anything that has ``write``, without torch.

`plan_torch_file` says from sizes alone where each storage's bytes will stand and how long the file will
be; `TorchFileWriter` writes exactly that, byte for byte what `torch.save` (2.13) writes for the same
pickle and storages: entries stored as they are, each content on a 64-byte boundary by an extra field of
the local header, CRC and sizes behind the content (so nothing is written twice), a zip64 directory.
Bytes are checksummed as they pass, without Python's lock, or come with their CRC from elsewhere.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from isal import isal_zlib

from dcp.errors import UsageError
from dcp.exporting.serialization_id import MAX_RECORDS, combine, serialization_id
from dcp.zip_format import CENTRAL, DESCRIPTOR, END, END64, LOCAL, LOCATOR64, STREAMED, UTF8, WIDE

ALIGNMENT = 64
"""Every entry's content begins at a multiple of this many bytes."""

_VERSION = b"3\n"
_ID_LENGTH = 40


class Sink(Protocol):
    """Where the file goes."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Take all of ``data``."""


@dataclass(frozen=True, slots=True)
class PlannedEntry:
    """One entry of the archive. Offsets are bytes from the file's start.

    Attributes:
        name: without the archive's own directory: ``data.pkl``, ``data/0``, ...
        header: where the local header begins.
        start: where the content begins; it covers ``start <= i < start + size``.
        size: bytes of content.
        end: where the next entry begins.
    """

    name: str
    header: int
    start: int
    size: int
    end: int


@dataclass(frozen=True, slots=True)
class TorchFilePlan:
    """Where everything in the file stands.

    Attributes:
        archive_name: directory inside the archive under which every entry stands.
        entries: in file order; the storages are ``entries[4:-2]``.
        size: bytes of the whole file.
    """

    archive_name: str
    entries: tuple[PlannedEntry, ...]
    size: int

    @property
    def storages(self) -> tuple[PlannedEntry, ...]:
        """The storages' entries."""
        return self.entries[4:-2]


def archive_name_for(path: str) -> str:
    """The archive name that `torch.save` gives a file written to ``path`` (or a URL that ends in a name).

    Raises:
        UsageError: nothing is left of the name, as for ``.pt``; torch refuses that too.
    """
    if not path.isascii():
        return "archive"
    name = path.replace("\\", "/").rpartition("/")[2]
    stem = name.rpartition(".")[0] if "." in name else name
    if not stem:
        raise UsageError(f"{path!r} does not name a file that torch.save could write; use NAME.pt")
    return stem


def plan_torch_file(
    pickle_size: int, storages: Iterable[tuple[str, int]], *, archive_name: str = "archive"
) -> TorchFilePlan:
    """Lay the file out.

    Args:
        pickle_size: bytes of ``data.pkl``.
        storages: key and bytes of each storage, in the order in which they will be written.
        archive_name: see `archive_name_for`; ``archive`` is what torch uses for a buffer.

    Raises:
        UsageError: a key comes twice, or the archive would outgrow the format.
    """
    contents = [
        ("data.pkl", pickle_size),
        (".format_version", 1),
        (".storage_alignment", 2),
        ("byteorder", 6),
    ]
    contents += [(f"data/{key}", size) for key, size in storages]
    contents += [("version", len(_VERSION)), (".data/serialization_id", _ID_LENGTH)]
    if len({name for name, _ in contents}) != len(contents) or len(contents) > MAX_RECORDS:
        raise UsageError("a storage key comes twice, or there are too many storages for one file")
    entries: list[PlannedEntry] = []
    position = directory = 0
    prefix = len(archive_name.encode()) + 1
    for name, size in contents:
        name_size = prefix + len(name.encode())
        wide = _wide_size(size, position)
        start = position + LOCAL.size + name_size + wide + 4
        start += -start % ALIGNMENT
        end = start + size + (0 if size == 0 else 24 if wide else 16)
        entries.append(PlannedEntry(name, position, start, size, end))
        directory += CENTRAL.size + name_size + wide
        position = end
    if directory >= WIDE:
        raise UsageError("the archive's directory would exceed 4 GiB, which torch cannot write")
    tail = directory + END64.size + LOCATOR64.size + END.size
    return TorchFilePlan(archive_name, tuple(entries), position + tail)


def _wide_size(size: int, header: int) -> int:
    """Bytes of an entry's zip64 field."""
    fields = (2 if size >= WIDE else 0) + (1 if header >= WIDE else 0)
    return 4 + 8 * fields if fields else 0


def _wide_field(entry: PlannedEntry, stored: int) -> bytes:
    """The zip64 field; ``stored`` is the compressed size it gives, as yet unknown in local headers."""
    numbers = [entry.size, stored] if entry.size >= WIDE else []
    numbers += [entry.header] if entry.header >= WIDE else []
    return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""


class TorchFileWriter:
    """Writes one file.

    The pickle is written at once; then `write_storage` takes each storage's bytes, in order, in pieces of
    any size; then `finish`. Storages without bytes need not be mentioned.

    Attributes:
        plan: where everything stands.
        position: bytes written so far.
    """

    def __init__(
        self, out: Sink, pickle: bytes, storages: Sequence[tuple[str, int]], *, archive_name: str = "archive"
    ) -> None:
        """Write what comes before the storages.

        Args:
            out: takes every byte of the file in order.
            pickle: the content of ``data.pkl``.
            storages: key and bytes of each storage, in order.
            archive_name: see `archive_name_for`.

        Raises:
            UsageError: see `plan_torch_file`.
        """
        self.plan = plan_torch_file(len(pickle), storages, archive_name=archive_name)
        self.position = 0
        self._out = out
        self._prefix = archive_name.encode() + b"/"
        self._next = 0
        self._opened = False
        self._head = b""
        self._written = 0
        self._crc = 0
        self._combined_crc = 0
        self._directory = bytearray()
        for content in (pickle, b"1", str(ALIGNMENT).encode(), b"little"):
            self._content(content)

    def write_storage(self, key: str, data: bytes | bytearray | memoryview, crc: int | None = None) -> None:
        """The next bytes of storage ``key``.

        Args:
            key: the storage being written, or the next one with bytes.
            data: any buffer, contiguous. Nothing happens if it is empty.
            crc: CRC-32 of ``data``, where it is known already.

        Raises:
            UsageError: another storage is due, or these are more bytes than were announced.
        """
        view = memoryview(data).cast("B")
        if not view:
            return
        name = f"data/{key}"
        while self._due().size == 0:
            self._content(b"")
        entry = self._due()
        if entry.name != name:
            raise UsageError(f"storage {key!r} is written out of turn; due is {entry.name}")
        if self._written + len(view) > entry.size:
            raise UsageError(f"storage {key!r} has {entry.size:,} bytes; more were written")
        self._content(view, crc)

    def finish(self) -> int:
        """Write what follows the storages; the file's size in bytes.

        Raises:
            UsageError: a storage is missing or incomplete.
        """
        while self._next < len(self.plan.entries) - 2:
            due = self._due()
            if due.size:
                raise UsageError(f"{due.name} is not complete: {self._written:,} of {due.size:,} bytes")
            self._content(b"")
        self._content(_VERSION)
        names = [entry.name for entry in self.plan.entries[:-1]]
        self._content(serialization_id(names, self._combined_crc).encode())
        self._end()
        return self.position

    def _due(self) -> PlannedEntry:
        return self.plan.entries[self._next]

    def _emit(self, data: bytes | memoryview) -> None:
        taken = self._out.write(data)
        if isinstance(taken, int) and taken != len(data):
            raise UsageError(f"the sink took {taken:,} of {len(data):,} bytes; it must take all it is given")
        self.position += len(data)

    def _content(self, data: bytes | memoryview, crc: int | None = None) -> None:
        """Part or all of the content that is due, with what stands around it."""
        entry = self._due()
        if not self._opened:
            self._open(entry)
        if len(self._head) < 8:
            self._head += bytes(data[: 8 - len(self._head)])
        if crc is None:
            self._crc = isal_zlib.crc32(data, self._crc)
        else:
            self._crc = isal_zlib.crc32_combine(self._crc, crc, len(data))
        if data:
            self._emit(data)
        self._written += len(data)
        if self._written == entry.size:
            self._close(entry)

    def _open(self, entry: PlannedEntry) -> None:
        name = self._prefix + entry.name.encode()
        wide = _wide_field(entry, 0)
        padding = entry.start - entry.header - LOCAL.size - len(name) - len(wide) - 4
        filler = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
        extra = len(wide) + len(filler)
        fixed = LOCAL.pack(b"PK\x03\x04", 0, _flags(entry), 0, 0, 0, 0, 0, 0, len(name), extra)
        self._emit(fixed + name + wide + filler)
        self._note(name[:8])
        self._opened = True

    def _close(self, entry: PlannedEntry) -> None:
        self._note(self._head)
        if entry.size:
            sizes = "<QQ" if entry.size >= WIDE or entry.header >= WIDE else "<II"
            descriptor = DESCRIPTOR + self._crc.to_bytes(4, "little")
            self._emit(descriptor + struct.pack(sizes, entry.size, entry.size))
            self._note(descriptor)
        name = self._prefix + entry.name.encode()
        wide = _wide_field(entry, entry.size)
        size = min(entry.size, WIDE)
        self._directory += CENTRAL.pack(
            *(b"PK\x01\x02", 0, 0, _flags(entry), 0, 0, 0, self._crc, size, size),
            *(len(name), len(wide), 0, 0, 0, 0, min(entry.header, WIDE)),
        )
        self._directory += name + wide
        self._opened = False
        self._head, self._written, self._crc = b"", 0, 0
        self._next += 1

    def _note(self, written: bytes) -> None:
        """Combine a CRC into the identifier.

        torch takes the CRC from what it writes: any block that begins as a descriptor does counts as one,
        even if it is a storage's content or a name.
        """
        if len(written) == 8 and written[:4] == DESCRIPTOR:
            self._combined_crc = combine(self._combined_crc, int.from_bytes(written[4:], "little"))

    def _end(self) -> None:
        start, size, count = self.position, len(self._directory), len(self.plan.entries)
        made_by, needed = 0x031E, 45
        self._emit(
            bytes(self._directory)
            + END64.pack(b"PK\x06\x06", END64.size - 12, made_by, needed, 0, 0, count, count, size, start)
            + LOCATOR64.pack(b"PK\x06\x07", 0, start + size, 1)
            + END.pack(b"PK\x05\x06", 0, 0, *[min(count, 0xFFFF)] * 2, size, min(start, WIDE), 0)
        )


def _flags(entry: PlannedEntry) -> int:
    return UTF8 | (STREAMED if entry.size else 0)
