"""How many bytes and requests one rank's load takes, counted on arrays without a plan of single reads.

`Columns` holds the chunks and objects of an index in the order in which they stand in storage. `count` does
for all of them at once what `dcp.load.regions.spans`, `dcp.load.pull` and `dcp.storage.coalesce` do one by
one. A layout shards the first dimension and at most one other, so a chunk is a matrix of runs of bytes here:
its rows are the indices of all dimensions before that other one. Where there are several such dimensions and
a chunk is too large for one request, the requests are an estimate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp.columns import BoxColumns, RecordColumns
from dcp.dtypes import ITEMSIZE
from dcp.index import CheckpointIndex, TensorEntry
from dcp.layout import Layout
from dcp.load.requests import GAP, GROUP, REQUEST, SMALL, TINY
from dcp.records import HEAD
from dcp.tp_rules import TpRules

Ints = npt.NDArray[np.int64]

_FRONT = 704
"""Bytes before the data in a record as torch writes it; fewer where the record has no room for them."""

_AT_ONCE = 1 << 20
"""Chunks of several ranks that are sorted at once, if a rank has not more."""

_ROWS = 15
"""Object, offset, length, compressed, inner; shape, offset, size of the first dimension, then of tp's; has
the first, has tp's; rows, tp first."""


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
    """Elements of the tensor along its first dimension, and along the one that tp shards if it is another."""
    offset: tuple[Ints, Ints]
    """Where the chunk begins along them."""
    size: tuple[Ints, Ints]
    """The chunk's elements along them."""
    sharded: tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]
    """Whether the tensor has that dimension."""
    inner: Ints
    """Bytes of one index of both dimensions; 0 for an object."""
    rows: Ints
    """The chunk's elements between the two dimensions: rows for each index of the first."""
    tp_first: npt.NDArray[np.bool_]
    """Whether tp shards the first dimension, before fsdp does."""

    @classmethod
    def of(cls, index: CheckpointIndex, rules: TpRules | None = None) -> Columns:
        """The columns of an index whose numbers were checked; what has no record is left out.

        Args:
            index: of what is to be loaded.
            rules: what the tp axis of layouts shards.

        Raises:
            UsageError: a rule names a dimension that a tensor does not have.
        """
        names = {name: number for number, name in enumerate(sorted(index.files()))}
        layout = Layout(tp=1, rules=rules)
        blocks = [_chunks(entry, names, layout) for entry in index.tensors if len(entry.chunks)]
        objects = [
            [names[r.path], r.offset, r.length, 0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 1, 0]
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
            rows=table[13],
            tp_first=table[14] > 0,
        )

    def take(self, numbers: Ints) -> Columns:
        """The columns of some of the chunks and objects, in their order."""
        return Columns(
            file=self.file[numbers],
            start=self.start[numbers],
            length=self.length[numbers],
            plain=self.plain[numbers],
            compressed=self.compressed[numbers],
            shape=(self.shape[0][numbers], self.shape[1][numbers]),
            offset=(self.offset[0][numbers], self.offset[1][numbers]),
            size=(self.size[0][numbers], self.size[1][numbers]),
            sharded=(self.sharded[0][numbers], self.sharded[1][numbers]),
            inner=self.inner[numbers],
            rows=self.rows[numbers],
            tp_first=self.tp_first[numbers],
        )


def _chunks(entry: TensorEntry, names: dict[str, int], layout: Layout) -> Ints:
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
    [tp_dim] = layout.shard_dims(entry.shape, entry.key)
    second = tp_dim or None
    for number, (dim, row) in enumerate(((0 if rank else None, 5), (second, 8))):
        if dim is not None:
            table[row], table[row + 1], table[row + 2] = entry.shape[dim], offsets[:, dim], sizes[:, dim]
            table[11 + number] = 1
        else:
            table[row], table[row + 2] = 1, 1
    end = 1 if second is None else second
    table[4] = ITEMSIZE[entry.dtype] * _volumes(sizes[:, end + (second is not None) :])
    table[13] = _volumes(sizes[:, 1:end])
    table[14] = tp_dim == 0
    return table


def _volumes(sizes: Ints) -> Ints:
    """Elements of each row's sizes."""
    product: Ints = sizes.prod(axis=1, dtype=np.int64) if sizes.shape[1] else np.ones(len(sizes), np.int64)
    return product


def counts(columns: Columns, layout: Layout) -> list[RankReads]:
    """What each rank of a layout reads, by rank."""
    inner = layout.ranks // layout.axes[0][1]
    reads: list[RankReads] = []
    unsharded: RankReads | None = None
    for outer, held in _by_place(columns, layout):
        if held.sharded[0].any() or held.sharded[1].any():
            reads += [count(held, layout, outer * inner + number) for number in range(inner)]
            continue
        # Ranks beyond the end of every tensor hold the same, whichever they are: what is on all ranks.
        if unsharded is None:
            unsharded = count(held, layout, outer * inner)
        reads += [unsharded] * inner
    return reads


def _by_place(columns: Columns, layout: Layout) -> Iterator[tuple[int, Columns]]:
    """For each place along the outermost axis, the columns of what ranks there may hold, and little else."""
    low, high = _places(columns, layout)
    places = layout.axes[0][1]
    begun = np.bincount(low, minlength=places + 1) - np.bincount(high + 1, minlength=places + 1)
    sizes = np.cumsum(begun)[:places]
    start = 0
    while start < places:
        stop, total = start + 1, int(sizes[start])
        while stop < places and total + int(sizes[stop]) <= _AT_ONCE:
            total += int(sizes[stop])
            stop += 1
        first, last = np.maximum(low, start), np.minimum(high, stop - 1)
        several = np.maximum(last - first + 1, 0)
        members = np.repeat(np.arange(len(low)), several)
        ends = np.cumsum(several)
        place = first[members] + np.arange(len(members)) - np.repeat(ends - several, several)
        order = np.argsort(place, kind="stable")
        bounds = np.searchsorted(place[order], np.arange(start, stop + 1))
        for number in range(start, stop):
            yield number, columns.take(members[order[bounds[number - start] : bounds[number - start + 1]]])
        start = stop


def _places(columns: Columns, layout: Layout) -> tuple[Ints, Ints]:
    """First and last place along the outermost axis at which each chunk may be held; all where in doubt."""
    name, parts = layout.axes[0]
    by_first = np.full(len(columns.start), name == "fsdp") | columns.tp_first
    shape = np.where(by_first, columns.shape[0], columns.shape[1])
    low = np.where(by_first, columns.offset[0], columns.offset[1])
    high = low + np.where(by_first, columns.size[0], columns.size[1]) - 1
    known = np.where(by_first, columns.sharded[0], columns.sharded[1]) & (columns.inner > 0) & (high >= low)
    if name == "fsdp" and layout.tp is not None:
        # Counted from where the tp shard begins that fsdp divides, if the chunk lies in one alone.
        step = np.maximum(1, -(-shape // layout.tp))
        base = np.where(columns.tp_first, low // step * step, 0)
        known &= ~columns.tp_first | (high < base + step)
        shape = np.where(columns.tp_first, np.minimum(step, shape - base), shape)
        low, high = low - base, high - base
    step = np.maximum(1, -(-shape // parts))
    return (
        np.where(known, np.clip(low // step, 0, parts - 1), 0),
        np.where(known, np.clip(high // step, 0, parts - 1), parts - 1),
    )


def count(columns: Columns, layout: Layout, rank: int) -> RankReads:
    """What one rank of a layout reads of what ``columns`` hold."""
    place = _place(layout, rank)
    fsdp, tp = place.get("fsdp", (1, 0)), place.get("tp", (1, 0))
    start, length = _shard(columns.shape[0], *tp)
    begins = np.where(columns.tp_first, start, 0)
    start, length = _shard(np.where(columns.tp_first, length, columns.shape[0]), *fsdp)
    ranges = ((begins + start, length), _shard(columns.shape[1], *tp))
    first: list[Ints] = []
    held: list[Ints] = []
    for number, (begin, length) in enumerate(ranges):
        low, high = columns.offset[number], columns.offset[number] + columns.size[number]
        sharded = columns.sharded[number]
        low = np.where(sharded, np.maximum(low, begin), low)
        high = np.where(sharded, np.minimum(high, begin + length), high)
        first.append(low - columns.offset[number])
        held.append(high - low)
    is_object = ~(columns.plain | columns.compressed)
    met = np.flatnonzero(((held[0] > 0) & (held[1] > 0) & (columns.inner > 0)) | is_object)
    first_row, first_byte = (first[0] * columns.rows)[met], first[1][met] * columns.inner[met]
    rows, width = (held[0] * columns.rows)[met], held[1][met] * columns.inner[met]
    length, objects = columns.length[met], is_object[met]
    needed = int(np.where(objects, length, rows * width).sum())
    return RankReads(
        needed,
        _read_by_rows(columns, met, first_row, rows, first_byte, width),
        Count(int(length.sum()), len(met)),
    )


def _place(layout: Layout, rank: int) -> dict[str, tuple[int, int]]:
    """(parts, number of this rank's) by axis."""
    place = {}
    for name, size in reversed(layout.axes):
        place[name] = (size, rank % size)
        rank //= size
    return place


def _shard(lengths: Ints, parts: int, number: int) -> tuple[Ints, Ints]:
    """`dcp.layout.shard` of many lengths at once."""
    step = -(-lengths // parts)
    offset = np.minimum(step * number, lengths)
    return offset, np.minimum(step, lengths - offset)


def _read_by_rows(
    columns: Columns, met: Ints, first_row: Ints, rows: Ints, first_byte: Ints, width: Ints
) -> Count:
    """What `BucketReader` reads of the chunks ``met``: ``rows`` times ``width`` bytes of each."""
    start, length = columns.start[met], columns.length[met]
    stride = columns.size[1][met] * columns.inner[met]
    size = stride * (columns.size[0] * columns.rows)[met]
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
    # Objects are read before all tensors; a group's ranges are asked for in the order of storage.
    order = np.argsort((plain | compressed)[pieces], kind="stable")
    group = np.zeros(len(pieces), np.int64)
    group[order] = _groups(cost[order])
    order = np.argsort(group, kind="stable")
    joined = _joined(columns.file[met][pieces][order], begins[order], ends[order], group[order])
    return Count(
        heads + between + joined.bytes + int(length[alone].sum()),
        int(direct.sum()) + int((spans - 2)[several].sum()) + joined.requests + int(alone.sum()),
    )


def _joined(file: Ints, begins: Ints, ends: Ints, group: Ints) -> Count:
    """What is left when near ranges are joined, as `dcp.storage.coalesce` does within each group."""
    total = len(begins)
    if not total:
        return Count(0, 0)
    breaks = (file[1:] != file[:-1]) | (begins[1:] > ends[:-1] + GAP) | (group[1:] != group[:-1])
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


def _groups(cost: Ints) -> Ints:
    """The number of each read's group."""
    sums = np.cumsum(cost)
    begun = np.zeros(len(cost), np.int64)
    start: Any = 0
    while True:
        before = sums[start - 1] if start else 0
        start = max(start + 1, int(np.searchsorted(sums, before + GROUP, side="right")))
        if start >= len(cost):
            groups: Ints = np.cumsum(begun)
            return groups
        begun[start] = 1
