"""One value as `torch.save` wrote it: a zip archive in memory, its pickle and its storages, CRCs checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from dcp.errors import RecordError
from dcp.pickles.nodes import Value
from dcp.pickles.reader import read
from dcp.zip_entries import Entry, all_entries, is_zip

PICKLE = "data.pkl"


@dataclass(frozen=True)
class Archive:
    """A whole record, decoded. ``data`` is the zip's bytes; entries count offsets within it."""

    data: bytes
    entries: Mapping[str, Entry]

    @cached_property
    def pickle(self) -> bytes:
        return bytes(self.content(PICKLE))

    @cached_property
    def value(self) -> Value:
        """The pickle as plain values and nodes."""
        return read(self.pickle)

    def storage(self, key: str) -> memoryview:
        """Bytes of the storage that the pickle calls ``key``."""
        return self.content(f"data/{key}")

    def content(self, name: str) -> memoryview:
        """Bytes of an entry.

        Raises:
            RecordError: there is none of that name.
        """
        entry = self.entries.get(name)
        if entry is None or entry.size is None:
            raise RecordError(f"the archive has no entry {name}")
        return memoryview(self.data)[entry.start : entry.start + entry.size]


def open_archive(data: bytes) -> Archive:
    """Open a record's bytes and check every entry's CRC.

    Raises:
        RecordError: ``records.undecodable`` if it is no torch archive, ``records.corrupt`` if it is damaged.
    """
    from isal import isal_zlib

    if not is_zip(data):
        raise RecordError(f"a torch.save archive is expected, its first bytes are {data[:4].hex()}")
    entries = all_entries(data)
    if PICKLE not in entries:
        raise RecordError("the archive holds no data.pkl")
    archive = Archive(data, entries)
    # A writer with checksums switched off records 0 for every entry.
    if any(entry.crc32 for entry in entries.values()):
        for name, entry in entries.items():
            actual = isal_zlib.crc32(archive.content(name))
            if actual != entry.crc32:
                raise RecordError(
                    f"the CRC of entry {name} is {actual:08x}, recorded is {entry.crc32:08x}",
                    code="records.corrupt",
                    entry=name,
                    entry_start=entry.start,
                    entry_size=entry.size,
                    expected=entry.crc32,
                    actual=actual,
                )
    order = entries.get("byteorder")
    if order is not None and bytes(archive.content("byteorder")) != b"little":
        raise RecordError("the archive was written on a big-endian machine")
    return archive
