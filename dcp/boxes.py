"""Boxes: axis-aligned regions of a tensor, their intersections, and whether a set of them tiles a shape.

Pure geometry, no I/O and no torch. A `Box` is half-open along every dimension: it covers the indices
``offsets[d] <= i < offsets[d] + sizes[d]``, counted in elements. `check_tiling` is exact: it reports
every box outside the shape, every pair that overlaps and every region that nothing covers, and does
not rest on volumes, in which a gap and an overlap can cancel.

How the check stays near-linear: a group of boxes is cut along a dimension wherever no box crosses the
cut, and each part is checked alone. Grids, uneven shards and strided shards fall apart into single
boxes this way. Only a group that no straight cut divides (a pinwheel, or boxes that overlap) is swept
slab by slab, one dimension lower each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open region: ``offsets[d] <= index[d] < offsets[d] + sizes[d]``, in elements."""

    offsets: Shape
    sizes: Shape

    @property
    def ends(self) -> Shape:
        """Exclusive upper corner."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    @property
    def volume(self) -> int:
        """Number of elements; 1 for a scalar's box, 0 if any size is 0."""
        return prod(self.sizes)

    def shifted(self, origin: Shape) -> Box:
        """The same region seen from a coordinate system that starts at ``origin``."""
        return Box(tuple(o - p for o, p in zip(self.offsets, origin, strict=True)), self.sizes)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(self.offsets, self.sizes, strict=True)) + "]"


def whole(shape: Shape) -> Box:
    """The box that covers all of ``shape``."""
    return Box((0,) * len(shape), shape)


def intersect(a: Box, b: Box) -> Box | None:
    """The common region of two boxes of the same rank, or None where they share no element."""
    offsets: list[int] = []
    sizes: list[int] = []
    for a_off, a_size, b_off, b_size in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True):
        low = max(a_off, b_off)
        high = min(a_off + a_size, b_off + b_size)
        if high <= low:
            return None
        offsets.append(low)
        sizes.append(high - low)
    return Box(tuple(offsets), tuple(sizes))


@dataclass(slots=True)
class Tiling:
    """What `check_tiling` found. Indices count in the order of the boxes given."""

    out_of_bounds: list[int] = field(default_factory=list)
    """Boxes that leave the shape or have another rank than it."""
    overlaps: list[tuple[int, int, Box]] = field(default_factory=list)
    """Pairs ``(i, j)`` with ``i < j`` and the region both cover."""
    gaps: list[Box] = field(default_factory=list)
    """Disjoint regions of the shape that no box covers."""
    truncated: bool = False
    """Whether the search stopped at its limit of faults; those listed are right, more exist."""

    @property
    def ok(self) -> bool:
        return not (self.out_of_bounds or self.overlaps or self.gaps)


def in_bounds(shape: Shape, box: Box) -> bool:
    """Whether ``box`` has the rank of ``shape`` and lies inside it. A zero-size box may touch the end."""
    if not len(box.offsets) == len(box.sizes) == len(shape):
        return False
    for offset, size, extent in zip(box.offsets, box.sizes, shape, strict=True):
        if offset < 0 or size < 0 or offset + size > extent:
            return False
    return True


def check_tiling(shape: Shape, boxes: Sequence[Box], limit: int = 10_000) -> Tiling:
    """Whether ``boxes`` cover ``shape`` exactly once, and where not.

    Args:
        shape: sizes of the whole tensor, in elements; ``()`` for a scalar.
        boxes: chunks in any order; zero-size ones are allowed and cover nothing.
        limit: number of overlaps plus gaps after which the search ends (`Tiling.truncated`).
    """
    if not isinstance(boxes, tuple | list):
        from dcp.columns import BoxColumns
        from dcp.tiled import is_tiled

        if isinstance(boxes, BoxColumns) and is_tiled(shape, boxes):
            return Tiling()
        boxes = tuple(boxes)
    result = Tiling()
    solid: list[int] = []
    covered = 0
    for number, box in enumerate(boxes):
        if not in_bounds(shape, box):
            result.out_of_bounds.append(number)
        elif volume := prod(box.sizes):
            solid.append(number)
            covered += volume
    if prod(shape) == 0 or (covered == prod(shape) and _are_slices(shape, [boxes[i] for i in solid])):
        return result
    _Sweep(boxes, result, limit).run(whole(shape), solid)
    return result


def _are_slices(shape: Shape, boxes: list[Box]) -> bool:
    """Whether boxes are disjoint along one dimension, as shards usually are."""
    dim = next((d for d, n in enumerate(shape) if boxes[0].sizes[d] != n), 0)
    if not shape:
        return len(boxes) == 1
    spans = sorted([(box.offsets[dim], box.sizes[dim]) for box in boxes])
    reach = 0
    for offset, size in spans:
        if offset < reach:
            return False
        reach = offset + size
    return True


class _LimitReached(Exception):
    pass


class _Sweep:
    def __init__(self, boxes: Sequence[Box], result: Tiling, limit: int) -> None:
        self.boxes = boxes
        self.result = result
        self.limit = limit
        self.pairs: set[tuple[int, int]] = set()

    def run(self, region: Box, members: list[int]) -> None:
        try:
            # An explicit stack, because the depth is up to the data, and of iterators, because the
            # slabs of a hostile set of boxes would not fit in memory at once.
            work = [iter([(region, members)])]
            while work:
                group = next(work[-1], None)
                if group is None:
                    work.pop()
                else:
                    work.append(iter(self._split(*group)))
        except _LimitReached:
            self.result.truncated = True
        self.result.overlaps.sort(key=lambda item: item[:2])
        self.result.gaps = _merge(self.result.gaps)

    def _gap(self, region: Box) -> None:
        self.result.gaps.append(region)
        self._count()

    def _overlap(self, i: int, j: int) -> None:
        pair = (min(i, j), max(i, j))
        if pair in self.pairs:
            return
        common = intersect(self.boxes[i], self.boxes[j])
        assert common is not None
        self.pairs.add(pair)
        self.result.overlaps.append((*pair, common))
        self._count()

    def _count(self) -> None:
        if len(self.result.gaps) + len(self.result.overlaps) >= self.limit:
            raise _LimitReached

    def _split(self, region: Box, members: list[int]) -> Iterable[tuple[Box, list[int]]]:
        """Check one group, or return the independent smaller groups it falls into."""
        if not members:
            self._gap(region)
            return ()
        if len(members) == 1 and self._fills(region, members[0]):
            return ()
        for dim in range(len(region.sizes)):
            parts = list(self._cut(region, members, dim))
            if len(parts) > 1:
                return parts
        return self._slabs(region, members)

    def _fills(self, region: Box, member: int) -> bool:
        box = self.boxes[member]
        for o, s, b_off, b_size in zip(region.offsets, region.sizes, box.offsets, box.sizes, strict=True):
            if b_off > o or b_off + b_size < o + s:
                return False
        return True

    def _cut(self, region: Box, members: list[int], dim: int) -> Iterator[tuple[Box, list[int]]]:
        """Divide at every coordinate of ``dim`` that no member crosses, uncovered stretches included."""
        boxes = self.boxes
        start, end = region.offsets[dim], region.offsets[dim] + region.sizes[dim]
        order = sorted(members, key=lambda i: boxes[i].offsets[dim])
        group: list[int] = []
        low = reach = start
        for i in order:
            box = boxes[i]
            first = max(box.offsets[dim], start)
            last = min(box.offsets[dim] + box.sizes[dim], end)
            if first >= reach and group:
                yield _clip(region, dim, low, reach), group
                group, low = [], reach
            if first > reach:
                yield _clip(region, dim, reach, first), []
                low = first
            group.append(i)
            reach = max(reach, last)
        if group:
            yield _clip(region, dim, low, reach), group
        if reach < end:
            yield _clip(region, dim, reach, end), []

    def _slabs(self, region: Box, members: list[int]) -> Iterable[tuple[Box, list[int]]]:
        """A group no cut divides: slice it at every start and end along the first dimension that has any.

        Within a slab every member spans the slab's whole thickness, so cuts along the other dimensions
        decide it; where no dimension has an inner boundary left, all members fill the region together.
        """
        boxes = self.boxes
        for dim in range(len(region.sizes)):
            start, end = region.offsets[dim], region.offsets[dim] + region.sizes[dim]
            edges = {start, end}
            for i in members:
                edges.add(max(boxes[i].offsets[dim], start))
                edges.add(min(boxes[i].offsets[dim] + boxes[i].sizes[dim], end))
            if len(edges) > 2:
                return self._slice(region, members, dim, sorted(edges))
        for position, i in enumerate(members):
            for j in members[position + 1 :]:
                self._overlap(i, j)
        return ()

    def _slice(
        self, region: Box, members: list[int], dim: int, edges: list[int]
    ) -> Iterator[tuple[Box, list[int]]]:
        boxes = self.boxes
        order = sorted(members, key=lambda i: boxes[i].offsets[dim])
        active: list[int] = []
        upcoming = 0
        for low, high in pairwise(edges):
            active = [i for i in active if boxes[i].offsets[dim] + boxes[i].sizes[dim] > low]
            while upcoming < len(order) and boxes[order[upcoming]].offsets[dim] <= low:
                if boxes[order[upcoming]].offsets[dim] + boxes[order[upcoming]].sizes[dim] > low:
                    active.append(order[upcoming])
                upcoming += 1
            yield _clip(region, dim, low, high), list(active)


def _clip(region: Box, dim: int, low: int, high: int) -> Box:
    offsets, sizes = list(region.offsets), list(region.sizes)
    offsets[dim], sizes[dim] = low, high - low
    return Box(tuple(offsets), tuple(sizes))


def _merge(gaps: list[Box]) -> list[Box]:
    """Join gaps that slicing tore apart, so that one missing chunk reads as one gap."""
    if not gaps:
        return gaps
    for dim in reversed(range(len(gaps[0].sizes))):
        merged: list[Box] = []
        for gap in sorted(
            gaps, key=lambda g: (_without(g.offsets, dim), _without(g.sizes, dim), g.offsets[dim])
        ):
            last = merged[-1] if merged else None
            if (
                last is not None
                and _without(last.offsets, dim) == _without(gap.offsets, dim)
                and _without(last.sizes, dim) == _without(gap.sizes, dim)
                and last.offsets[dim] + last.sizes[dim] == gap.offsets[dim]
            ):
                merged[-1] = _clip(last, dim, last.offsets[dim], gap.offsets[dim] + gap.sizes[dim])
            else:
                merged.append(gap)
        gaps = merged
    return sorted(gaps, key=lambda g: g.offsets)


def _without(values: Shape, dim: int) -> Shape:
    return values[:dim] + values[dim + 1 :]
