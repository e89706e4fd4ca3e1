"""How tensors and chunks are cut into pieces whose bytes are read at once. Pure geometry, no I/O, no torch.

`bands` cuts a whole tensor into regions of limited size, each contiguous in C order, so that a tensor
larger than the memory budget can be loaded piece by piece. `spans` cuts the region of a chunk that a
request needs into pieces of one byte range each, leaving out what lies between if it is worth a request
of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from operator import mul

from dcp.boxes import Box, Shape, intersect


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a chunk, stored in C order, and the bytes of the chunk that hold it."""

    box: Box
    """The piece, from the chunk's origin, in elements."""
    start: int
    """First byte, from the chunk's first."""
    end: int
    """Exclusive end, in bytes."""


def strides(shape: Shape) -> Shape:
    """Steps in elements between neighbours along each dimension of a C-ordered array of ``shape``."""
    steps = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        steps[dim] = steps[dim + 1] * shape[dim + 1]
    return tuple(steps)


def moved(box: Box, origin: Shape) -> Box:
    """A box counted from ``origin``, counted from where ``origin`` is counted from; undoes `Box.shifted`."""
    return Box(tuple(o + p for o, p in zip(box.offsets, origin, strict=True)), box.sizes)


def bands(shape: Shape, itemsize: int, limit: int) -> Iterator[Box]:
    """Cut ``shape`` into boxes of at most ``limit`` bytes, in C order, each contiguous in C order.

    A box is one element where that is already more than ``limit``. A shape without elements has none.
    """
    if prod(shape) == 0:
        return
    dim = 0
    while dim < len(shape) - 1 and prod(shape[dim + 1 :]) * itemsize > limit:
        dim += 1
    if not shape:
        yield Box((), ())
        return
    step = max(1, limit // (prod(shape[dim + 1 :]) * itemsize))
    rest = shape[dim + 1 :]
    for outer in product(*map(range, shape[:dim])):
        for start in range(0, shape[dim], step):
            size = min(step, shape[dim] - start)
            yield Box((*outer, start, *(0,) * len(rest)), (*(1,) * dim, size, *rest))


@dataclass(frozen=True, slots=True)
class Cuts:
    """The bands of one tensor."""

    boxes: tuple[Box, ...]
    """As `bands` made them, in C order."""
    starts: tuple[int, ...]
    """Position of each band's first element in the tensor, counted in C order."""
    steps: Shape
    """The tensor's `strides`."""

    @classmethod
    def of(cls, shape: Shape, itemsize: int, limit: int) -> Cuts:
        """Cut as `bands` does."""
        boxes, steps = tuple(bands(shape, itemsize, limit)), strides(shape)
        return cls(boxes, tuple(_place(box.offsets, steps) for box in boxes), steps)

    def overlapping(self, box: Box) -> Iterator[tuple[int, Box]]:
        """(number, common region) for each band that ``box`` meets, in order."""
        if not box.volume:
            return
        first = _place(box.offsets, self.steps)
        last = first + sum((n - 1) * step for n, step in zip(box.sizes, self.steps, strict=True))
        number = bisect_right(self.starts, first) - 1
        while number < len(self.starts) and self.starts[number] <= last:
            common = intersect(self.boxes[number], box)
            if common is not None:
                yield number, common
            number += 1


def _place(corner: Shape, steps: Shape) -> int:
    return sum(map(mul, corner, steps))


def span_of(region: Box, shape: Shape, itemsize: int) -> Span:
    """The one span of a region that is contiguous in a chunk of ``shape``, stored in C order."""
    start = _place(region.offsets, strides(shape)) * itemsize
    return Span(region, start, start + region.volume * itemsize)


def spans(region: Box, shape: Shape, itemsize: int, *, gap: int, limit: int) -> Iterator[Span]:
    """Cut ``region`` of a C-ordered chunk into pieces with one byte range each, in order of position.

    Args:
        region: what is needed, in elements from the chunk's origin.
        shape: the chunk's sizes, in elements.
        itemsize: bytes an element.
        gap: bytes not needed that a range may hold between two runs of needed ones.
        limit: bytes a range may have, unless a single element takes more.
    """
    if not region.volume:
        return
    steps = [step * itemsize for step in strides(shape)]
    # `inner[d]` is what one index of dimension d spans: from its first needed byte to its last.
    inner = [itemsize] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        inner[dim - 1] = inner[dim] + (region.sizes[dim] - 1) * steps[dim]
    joins = [n == 1 or s - i <= gap for n, s, i in zip(region.sizes, steps, inner, strict=True)]
    cut = 0
    while cut < len(shape) - 1 and not (all(joins[cut + 1 :]) and inner[cut] <= limit):
        cut += 1
    if not shape:
        yield Span(region, 0, itemsize)
        return
    step = max(1, (limit - inner[cut]) // steps[cut] + 1) if joins[cut] and limit >= inner[cut] else 1
    outer = (range(o, o + n) for o, n in zip(region.offsets[:cut], region.sizes[:cut], strict=True))
    for place in product(*outer):
        for first in range(region.offsets[cut], region.offsets[cut] + region.sizes[cut], step):
            count = min(step, region.offsets[cut] + region.sizes[cut] - first)
            corner = (*place, first, *region.offsets[cut + 1 :])
            start = sum(c * s for c, s in zip(corner, steps, strict=True))
            end = start + (count - 1) * steps[cut] + inner[cut]
            yield Span(Box(corner, (*(1,) * cut, count, *region.sizes[cut + 1 :])), start, end)
