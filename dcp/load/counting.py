"""How many bytes and requests one rank's load takes, counted on arrays without a plan of single reads.

`Columns` holds the chunks and objects of an index in the order in which they stand in storage. `count` does
for all of them at once what `dcp.load.regions.spans`, `dcp.load.pull` and `dcp.storage.coalesce` do one by
one; a layout shards the first two dimensions alone, so a chunk is a matrix of runs of bytes here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp.columns import BoxColumns, RecordColumns
from dcp.dtypes import ITEMSIZE
from dcp.index import CheckpointIndex, TensorEntry
from dcp.layout import Layout
from dcp.load.pull import GAP, REQUEST, SMALL, TINY
from dcp.load.reader import GROUP
from dcp.records import HEAD

Ints = npt.NDArray[np.int64]

_FRONT = 704
"""Bytes before the data in a record as torch writes it; fewer where the record has no room for them."""

_ROWS = 13
"""Object, offset, length, compressed, inner; shape, offset, size of dimension 0, then of 1; has 0, has 1."""


@dataclass(frozen=True, slots=True)
class Count:
    """Bytes and ranges that one rank reads."""

    bytes: int
    requests: int


@dataclass(frozen=True, slots=True)
class RankReads:
    """What one rank needs in bytes, and what it takes to read that."""

    needed: int
    bucket_reader: Count
    torch_reader: Count


@dataclass(frozen=True, slots=True)
class Columns:
    """Chunks and objects, sorted by object name and offset; one array element each.

    A dimension that a tensor does not have is one of size 1, which ``sharded`` says is not sharded.
    """

    file: Ints
    """Number of the object the record stands in, in order of names."""
    start: Ints
    """First byte of the record in its object."""
    length: Ints
    """Bytes of the record."""
    plain: npt.NDArray[np.bool_]
    """Whether the record is stored as it is: neither an object nor compressed."""
    compressed: npt.NDArray[np.bool_]
    shape: tuple[Ints, Ints]
    """Elements of the tensor along its first and its second dimension."""
    offset: tuple[Ints, Ints]
    """Where the chunk begins along them."""
    size: tuple[Ints, Ints]
    """The chunk's elements along them."""
    sharded: tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]
    """Whether the tensor has that dimension."""
    inner: Ints
    """Bytes of one index of both dimensions; 0 for an object."""

    @classmethod
    def of(cls, index: CheckpointIndex) -> Columns:
        """The columns of an index whose numbers were checked; what has no record is left out."""
        names = {name: number for number, name in enumerate(sorted(index.files()))}
        blocks = [_chunks(entry, names) for entry in index.tensors if len(entry.chunks)]
        objects = [
            [names[r.path], r.offset, r.length, 0, 0, 1, 0, 1, 1, 0, 1, 0, 0]
            for entry in index.objects
            if (r := entry.record) is not None
        ]
        if objects:
            blocks.append(np.array(objects, np.int64).T)
        table = np.concatenate(blocks, axis=1) if blocks else np.empty((_ROWS, 0), np.int64)
        table = table[:, table[2] > 0]
        table = np.ascontiguousarray(table[:, np.lexsort((table[1], table[0]))])
        return cls(
            file=table[0],
            start=table[1],
            length=table[2],
            plain=(table[3] == 0) & (table[4] > 0),
            compressed=table[3] > 0,
            shape=(table[5], table[8]),
            offset=(table[6], table[9]),
            size=(table[7], table[10]),
            sharded=(table[11] > 0, table[12] > 0),
            inner=table[4],
        )


def _chunks(entry: TensorEntry, names: dict[str, int]) -> Ints:
    """One row a column of `Columns`, in the order that `_ROWS` says."""
    boxes, records = entry.chunks.boxes, entry.chunks.records
    total, rank = len(boxes), len(entry.shape)
    table = np.zeros((_ROWS, total), np.int64)
    if isinstance(records, RecordColumns):
        numbers = np.array([names.get(path, 0) for path, _ in records.places] or [0], np.int64)
        packed = np.array([bool(transforms) for _, transforms in records.places] or [False], np.int64)
        held = records.place >= 0
        table[0], table[3] = numbers[records.place], packed[records.place]
        table[1], table[2] = records.offset, np.where(held, records.length, 0)
    else:
        for number, record in enumerate(records):
            if record is not None:
                transformed = int(bool(record.transforms))
                table[:4, number] = names[record.path], record.offset, record.length, transformed
    if isinstance(boxes, BoxColumns):
        offsets, sizes = boxes.offsets, boxes.sizes
    else:
        offsets = np.array([box.offsets for box in boxes], np.int64).reshape(total, rank)
        sizes = np.array([box.sizes for box in boxes], np.int64).reshape(total, rank)
    for dim, row in ((0, 5), (1, 8)):
        if dim < rank:
            table[row], table[row + 1], table[row + 2] = entry.shape[dim], offsets[:, dim], sizes[:, dim]
            table[11 + dim] = 1
        else:
            table[row], table[row + 2] = 1, 1
    table[4] = ITEMSIZE[entry.dtype] * _volumes(sizes[:, 2:])
    return table


def _volumes(sizes: Ints) -> Ints:
    """Elements of each row's sizes."""
    product: Ints = sizes.prod(axis=1, dtype=np.int64) if sizes.shape[1] else np.ones(len(sizes), np.int64)
    return product


def count(columns: Columns, layout: Layout, rank: int) -> RankReads:
    """What one rank of a layout reads."""
    place = _place(layout, rank)
    first: list[Ints] = []
    held: list[Ints] = []
    for dim in (0, 1):
        low, high = columns.offset[dim], columns.offset[dim] + columns.size[dim]
        if dim in place:
            parts, number = place[dim]
            shape, sharded = columns.shape[dim], columns.sharded[dim]
            step = -(-shape // parts)
            low = np.where(sharded, np.maximum(low, np.minimum(step * number, shape)), low)
            high = np.where(sharded, np.minimum(high, step * (number + 1)), high)
        first.append(low - columns.offset[dim])
        held.append(high - low)
    is_object = ~(columns.plain | columns.compressed)
    met = np.flatnonzero(((held[0] > 0) & (held[1] > 0) & (columns.inner > 0)) | is_object)
    rows, width = held[0][met], held[1][met] * columns.inner[met]
    length, objects = columns.length[met], is_object[met]
    needed = int(np.where(objects, length, rows * width).sum())
    return RankReads(
        needed,
        _read_by_rows(columns, met, first[0][met], rows, first[1][met] * columns.inner[met], width),
        Count(int(length.sum()), len(met)),
    )


def _place(layout: Layout, rank: int) -> dict[int, tuple[int, int]]:
    """(parts, number of this rank's) by dimension."""
    place = {}
    for name, size in reversed(layout.axes):
        place[0 if name == "fsdp" else 1] = (size, rank % size)
        rank //= size
    return place


def _read_by_rows(
    columns: Columns, met: Ints, first_row: Ints, rows: Ints, first_byte: Ints, width: Ints
) -> Count:
    """What `BucketReader` reads of the chunks ``met``: ``rows`` times ``width`` bytes of each."""
    start, length = columns.start[met], columns.length[met]
    stride = columns.size[1][met] * columns.inner[met]
    size = stride * columns.size[0][met]
    plain, compressed = columns.plain[met], columns.compressed[met]
    full = rows * width == size
    whole = (~plain & ~compressed) | (length <= TINY) | (full & (length <= SMALL))
    alone = compressed & ~whole
    direct = plain & ~whole
    gap = stride - width
    joins = (gap <= GAP) | (rows == 1)
    per_span = np.where(
        joins & (width <= REQUEST), np.maximum(1, (REQUEST - width) // np.maximum(stride, 1) + 1), 1
    )
    spans = np.where(width > REQUEST, rows * -(-width // REQUEST), -(-rows // per_span))
    spans = np.where(whole | alone, 1, spans)
    front = np.minimum(_FRONT, np.maximum(0, length - size))
    begin = start + front + first_row * stride + first_byte
    end = begin + (rows - 1) * stride + width
    reaches_end = end == start + front + size
    last = np.where(width > REQUEST, width - (width - 1) // REQUEST * REQUEST, 0)
    in_last = rows - (-(-rows // per_span) - 1) * per_span
    last = np.where(last > 0, last, (in_last - 1) * stride + width)
    opening = np.where(width > REQUEST, REQUEST, (np.minimum(per_span, rows) - 1) * stride + width)
    tail = np.where(reaches_end, start + length - end, 0)
    inside = np.where(width > REQUEST, rows * width, rows * width + (rows - spans) * gap)

    heads = int(np.minimum(HEAD, length[direct]).sum())
    several = direct & (spans > 1)
    between = int((inside - opening - last)[several].sum())
    pieces = np.repeat(np.flatnonzero(~alone), np.where(several, 2, 1)[~alone])
    is_second = np.zeros(len(pieces), np.bool_)
    is_second[1:] = pieces[1:] == pieces[:-1]
    is_first = several[pieces] & ~is_second
    begins = np.where(whole, start, begin)[pieces]
    ends = np.where(whole, start + length, end + tail)[pieces]
    begins = np.where(is_second, (end - last)[pieces], begins)
    ends = np.where(is_first, (begin + opening)[pieces], ends)
    cost = np.where(whole & plain, rows * width, np.where(whole, length, 0))[pieces]
    cost = np.where(direct[pieces], np.where(is_second, (inside - opening)[pieces], ends - begins), cost)
    joined = _joined(columns.file[met][pieces], begins, ends, cost)
    return Count(
        heads + between + joined.bytes + int(length[alone].sum()),
        int(direct.sum()) + int((spans - 2)[several].sum()) + joined.requests + int(alone.sum()),
    )


def _joined(file: Ints, begins: Ints, ends: Ints, cost: Ints) -> Count:
    """What is left when near ranges are joined, as `dcp.storage.coalesce` does within each group."""
    total = len(begins)
    if not total:
        return Count(0, 0)
    breaks = (file[1:] != file[:-1]) | (begins[1:] > ends[:-1] + GAP)
    breaks[_group_starts(cost) - 1] = True
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    stops = np.concatenate((starts[1:], [total]))
    extents = ends[stops - 1] - begins[starts]
    long = (extents > REQUEST) & (stops - starts > 1)
    size, requests = int(extents[~long].sum()), int((~long).sum())
    for start, stop in zip(starts[long].tolist(), stops[long].tolist(), strict=True):
        lows, highs = begins[start:stop].tolist(), ends[start:stop].tolist()
        low, high = lows[0], highs[0]
        for next_low, next_high in zip(lows[1:], highs[1:], strict=True):
            if next_high - low <= REQUEST:
                high = next_high
                continue
            size, requests = size + high - low, requests + 1
            low, high = next_low, next_high
        size, requests = size + high - low, requests + 1
    return Count(size, requests)


def _group_starts(cost: Ints) -> Ints:
    """Where new groups of reads begin, the first left out."""
    sums = np.cumsum(cost)
    found: list[int] = []
    start: Any = 0
    while True:
        before = sums[start - 1] if start else 0
        start = max(start + 1, int(np.searchsorted(sums, before + GROUP, side="right")))
        if start >= len(cost):
            return np.array(found, np.int64)
        found.append(start)
