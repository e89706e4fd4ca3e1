"""Do the chunks of every tensor cover it exactly once, and can their records hold them?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from dcp.boxes import Box, check_tiling
from dcp.columns import BoxColumns, RecordColumns
from dcp.dtypes import ITEMSIZE
from dcp.findings import Finding, finding
from dcp.index import TensorEntry
from dcp.record import Record


def check_tensor(entry: TensorEntry) -> Iterator[Finding]:
    """Chunks outside the tensor, overlaps, gaps, and records too short for their chunk."""
    chunks = entry.chunks
    tiling = check_tiling(entry.shape, chunks.boxes)
    for i in tiling.out_of_bounds:
        yield finding(
            "tiling.out-of-bounds",
            f"{entry.key}: chunk {chunks[i].box} lies outside the shape {list(entry.shape)}",
            key=entry.key,
            file=_file(entry, i),
            offsets=list(chunks[i].box.offsets),
            sizes=list(chunks[i].box.sizes),
            expected=list(entry.shape),
        )
    for i, j, common in tiling.overlaps:
        yield finding(
            "tiling.overlap",
            f"{entry.key}: chunks {chunks[i].box} and {chunks[j].box} both hold {common}",
            key=entry.key,
            file=_file(entry, j),
            offsets=list(common.offsets),
            sizes=list(common.sizes),
            chunks=[_where(chunks[i].box), _where(chunks[j].box)],
            bytes=common.volume * ITEMSIZE[entry.dtype],
        )
    for gap in tiling.gaps:
        yield finding(
            "tiling.gap",
            f"{entry.key}: no chunk holds {gap} of the shape {list(entry.shape)}",
            key=entry.key,
            offsets=list(gap.offsets),
            sizes=list(gap.sizes),
            bytes=gap.volume * ITEMSIZE[entry.dtype],
            expected=list(entry.shape),
        )
    if tiling.truncated:
        yield finding(
            "records.unchecked",
            f"{entry.key}: the tiling check stopped after {len(tiling.overlaps) + len(tiling.gaps)} faults",
            key=entry.key,
        )
    if 0 in entry.shape:
        yield from _empty(entry)
    yield from short_records(entry)


def _empty(entry: TensorEntry) -> Iterator[Finding]:
    """Chunks of a tensor without elements tile it trivially; their extents must still be the tensor's."""
    boxes = [box for box in entry.chunks.boxes if len(box.sizes) == len(entry.shape)]
    reach = tuple(max(ends) for ends in zip(*(box.ends for box in boxes), strict=True))
    if boxes and reach != entry.shape:
        yield finding(
            "tiling.gap",
            f"{entry.key}: its chunks reach to {list(reach)} of the shape {list(entry.shape)}",
            key=entry.key,
            expected=list(entry.shape),
            actual=list(reach),
        )


def short_records(entry: TensorEntry) -> Iterator[Finding]:
    """Findings about records that are too short for their chunk."""
    item = ITEMSIZE[entry.dtype]
    for box, record in _suspects(entry, item):
        if record is None or record.length >= prod(box.sizes) * item or record.transforms:
            continue
        yield finding(
            "records.mismatch",
            f"{entry.key}: chunk {box} of {entry.dtype} needs {box.volume * item} bytes, "
            f"its record in {record.path} has {record.length}",
            key=entry.key,
            file=record.path,
            offset=record.offset,
            length=record.length,
            expected=box.volume * item,
            actual=record.length,
        )


def _suspects(entry: TensorEntry, item: int) -> Iterable[tuple[Box, Record | None]]:
    """Chunks whose records could be too short for elements of ``item`` bytes, in order."""
    boxes, records = entry.chunks.boxes, entry.chunks.records
    if isinstance(boxes, BoxColumns) and isinstance(records, RecordColumns):
        import numpy as np

        rough = boxes.sizes.prod(axis=1, dtype=np.float64) * item
        exact = boxes.sizes.prod(axis=1) * item
        # Large products leave 64 bits, and are near enough as floats to choose by.
        needed = np.where(np.abs(rough) < 1 << 52, exact, rough + np.abs(rough) * 1e-9)
        short = np.flatnonzero((records.length < needed) & (records.place >= 0))
        return ((boxes[i], records[i]) for i in short.tolist())
    return zip(boxes, records, strict=True)


def _where(box: Box) -> dict[str, list[int]]:
    return {"offsets": list(box.offsets), "sizes": list(box.sizes)}


def _file(entry: TensorEntry, chunk: int) -> str | None:
    record = entry.chunks[chunk].record
    return None if record is None else record.path
