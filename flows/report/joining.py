"""The indices of a step's parts as one index, whose names begin with the part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dcp.columns import RecordColumns
from dcp.index import CheckpointIndex, Chunks, Entry, TensorEntry
from dcp.record import Record


def joined(parts: Mapping[str, CheckpointIndex]) -> CheckpointIndex | None:
    """One index of all parts; None if there are none.

    Args:
        parts: indices by what their names begin with, ``"model/"`` or nothing.
    """
    if not parts:
        return None
    if set(parts) == {""}:
        return parts[""]
    entries = {
        f"{prefix}{key}": _placed(entry, prefix)
        for prefix, index in parts.items()
        for key, entry in index.entries.items()
    }
    return CheckpointIndex(entries=entries, paths=None)


def _placed(entry: Entry, prefix: str) -> Entry:
    if not isinstance(entry, TensorEntry):
        return replace(entry, record=_moved(entry.record, prefix))
    records = entry.chunks.records
    if isinstance(records, RecordColumns):
        places = [(f"{prefix}{path}", transforms) for path, transforms in records.places]
        moved = RecordColumns(places, records.place, records.offset, records.length)
        return replace(entry, chunks=Chunks(entry.chunks.boxes, moved))
    return replace(
        entry, chunks=Chunks(entry.chunks.boxes, tuple(_moved(record, prefix) for record in records))
    )


def _moved(record: Record | None, prefix: str) -> Record | None:
    return None if record is None else replace(record, path=f"{prefix}{record.path}")
