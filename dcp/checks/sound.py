"""Which of an index's claims are worth any work: nobody allocates or counts by what no file can hold."""

from __future__ import annotations

from dcp.boxes import in_bounds
from dcp.columns import BoxColumns, RecordColumns
from dcp.index import Entry, ObjectEntry, TensorEntry
from dcp.record import Record

_CLAIM = 8
"""How many times larger than its records a tensor may say it is: work is not given to larger ones."""
_INFLATION = 1 << 16
"""The same for compressed records; zstd stays below it even on zeros."""
_MOST = 1 << 62
"""Beyond what a file has bytes or a dimension elements; twice as much still is a 64-bit number."""


def is_sound(entry: Entry) -> bool:
    """Whether all numbers are possible ones, and for a tensor, whether its records could hold it.

    Its chunks must lie inside it, and their records not be absurdly small for it. What an index says is not
    believed as far as to give work to a tensor of 10**18 elements.
    """
    if isinstance(entry, ObjectEntry):
        return entry.record is None or _is_possible(entry.record)
    return max(entry.shape, default=0) <= _MOST and _could_hold(entry) and _lies_within(entry)


def _could_hold(entry: TensorEntry) -> bool:
    records = entry.chunks.records
    if isinstance(records, RecordColumns):
        claims = [_claim(transforms) for _, transforms in records.places]
        return entry.nbytes <= records.capacity(claims)
    held = [record for record in records if record is not None]
    return all(map(_is_possible, held)) and entry.nbytes <= sum(r.length * _claim(r.transforms) for r in held)


def _lies_within(entry: TensorEntry) -> bool:
    boxes = entry.chunks.boxes
    if isinstance(boxes, BoxColumns):
        return boxes.all_within(entry.shape)
    return all(in_bounds(entry.shape, box) for box in boxes)


def _is_possible(record: Record) -> bool:
    return abs(record.offset) <= _MOST and abs(record.length) <= _MOST


def _claim(transforms: tuple[str, ...]) -> int:
    return _INFLATION if transforms else _CLAIM
