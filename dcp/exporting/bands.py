"""Bands: a tensor cut into pieces small enough for memory, each one stretch of the output.

A tensor's elements go out in C order. A `Band` is a box of the tensor that is contiguous in that order: one
index along the leading dimensions, a range along one dimension, everything along the rest. Within a chunk
the part of a band is contiguous too, because a band takes either one index or everything the chunk has
along each other dimension; so every `Piece` is one byte range of one chunk, and pieces of a chunk come in
rising order without holes. Pure values from the index; no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from dcp.boxes import Box, Shape, intersect
from dcp.dtypes import ITEMSIZE
from dcp.index import Chunk, TensorEntry


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a band that one chunk holds.

    Bytes ``start <= i < end`` of the chunk in C order; ``box`` is the region they fill, in elements of the
    whole tensor.
    """

    chunk: Chunk
    box: Box
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Band:
    """A contiguous stretch of a tensor's C-order bytes, and where its bytes come from."""

    box: Box
    nbytes: int
    pieces: tuple[Piece, ...]
    straight: bool
    """Whether the pieces' bytes, one after another, are the band's bytes."""


def spans(part: Box, of: Box) -> bool:
    """Whether ``part`` is contiguous in ``of`` in C order, its first dimension with several indices aside."""
    lead = next((d for d, size in enumerate(of.sizes) if size != 1), len(of.sizes))
    return part.sizes[lead + 1 :] == of.sizes[lead + 1 :]


MOST_PIECES = 2048
"""About how many pieces a band has at most: each takes memory too, and some checkpoints have millions."""


def with_few_pieces(entry: TensorEntry, budget: int) -> int:
    """``budget``, or as much less as it takes for few chunks to meet in a band."""
    return min(budget, max(1, MOST_PIECES * entry.nbytes // max(1, len(entry.chunks))))


def bands(entry: TensorEntry, budget: int) -> Iterator[Band]:
    """Cut a tensor into bands of at most ``budget`` bytes (at least one element each), in output order.

    The cuts depend on shape, type and budget alone: what is alike is cut alike, whatever its chunks.

    Args:
        entry: the tensor; its chunks must tile it.
        budget: bytes of a band.
    """
    item = ITEMSIZE[entry.dtype]
    if 0 in entry.shape:
        return
    waiting = deque(sorted((c for c in entry.chunks if c.box.volume), key=lambda c: c.box.offsets))
    active: list[Chunk] = []
    for box in _boxes(entry.shape, max(1, budget // item)):
        if box.sizes:
            first, last = box.offsets[0], box.offsets[0] + box.sizes[0]
            active = [c for c in active if c.box.offsets[0] + c.box.sizes[0] > first]
            while waiting and waiting[0].box.offsets[0] < last:
                active.append(waiting.popleft())
        else:
            active = list(waiting)
        pieces = sorted(_pieces(box, active, item), key=lambda piece: piece.box.offsets)
        yield Band(box, box.volume * item, tuple(pieces), all(spans(piece.box, box) for piece in pieces))


def _boxes(shape: Shape, limit: int) -> Iterator[Box]:
    """Boxes of at most ``limit`` elements, each contiguous, that follow one another in C order."""
    if not shape:
        yield Box((), ())
        return
    split = next((d for d in range(len(shape)) if prod(shape[d + 1 :]) <= limit), len(shape) - 1)
    inner = shape[split + 1 :]
    step = max(1, limit // prod(inner))
    for lead in product(*(range(n) for n in shape[:split])):
        for low in range(0, shape[split], step):
            yield Box(
                (*lead, low, *(0 for _ in inner)),
                (*(1 for _ in lead), min(step, shape[split] - low), *inner),
            )


def _pieces(box: Box, chunks: list[Chunk], item: int) -> Iterator[Piece]:
    for chunk in chunks:
        common = intersect(box, chunk.box)
        if common is not None:
            start = _flat(common.offsets, chunk.box) * item
            yield Piece(chunk, common, start, start + common.volume * item)


def _flat(index: Shape, box: Box) -> int:
    """Position of an element in a box's C order."""
    position = 0
    for i, offset, size in zip(index, box.offsets, box.sizes, strict=True):
        position = position * size + i - offset
    return position
