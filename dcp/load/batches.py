"""The plan of a test-load: which pieces of which tensors are in memory together. Pure, no I/O, no torch.

Every tensor is cut into bands (`dcp.load.regions.bands`), and bands and objects are put together into
batches. A batch is what is read at once; its bands are then loaded, compared and dropped one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dcp.boxes import Box
from dcp.columns import RecordColumns
from dcp.dtypes import ITEMSIZE
from dcp.index import CheckpointIndex, Entry, ObjectEntry, TensorEntry
from dcp.layout import Layout
from dcp.load.needs import ChunkNeed, Need, ObjectNeed
from dcp.load.regions import Cuts, span_of
from dcp.record import Record

BAND = 8 << 20
"""Most bytes of a band, where the memory budget would allow more."""
BATCH = 32 << 20
"""Most bytes of a batch, where the memory budget would allow more: small ones stay in the cache."""
SLICE = 20_000
"""Most chunks and bands that are planned at once. Each takes a few KiB in plans, with all ranks."""


@dataclass(frozen=True, slots=True)
class BandNeed:
    """What one band needs of one chunk. ``band`` and ``chunk`` are numbers, in the order of the tensor's."""

    need: ChunkNeed
    band: int
    chunk: int
    region: Box
    """The same piece of the tensor, in elements from the tensor's origin."""


@dataclass(frozen=True, slots=True)
class Band:
    """A piece of a tensor."""

    entry: TensorEntry
    number: int
    box: Box
    """Its region of the tensor."""
    needs: tuple[BandNeed, ...]
    cost: int
    """Bytes to be read for it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Bands and objects that are loaded together."""

    bands: tuple[Band, ...]
    objects: tuple[ObjectNeed, ...]

    @property
    def needs(self) -> list[Need]:
        """Everything to be read, in the order of `bands` and then of `objects`."""
        return [*(item.need for band in self.bands for item in band.needs), *self.objects]


def bytes_of(index: CheckpointIndex) -> int:
    """Bytes of all tensors in memory and of all objects as stored: what any layout needs."""
    objects = sum(entry.record.length for entry in index.objects if entry.record is not None)
    return objects + sum(entry.nbytes for entry in index.tensors)


def slices(index: CheckpointIndex, most: int = SLICE) -> Iterator[CheckpointIndex]:
    """Divide an index by keys, in the order in which their bytes stand in storage.

    Args:
        most: chunks and bands of a slice, unless a single tensor has more.
    """
    held: dict[str, Entry] = {}
    size = 0
    for entry in sorted(index.entries.values(), key=_first_byte):
        pieces = 1 if isinstance(entry, ObjectEntry) else len(entry.chunks) + entry.nbytes // BAND
        if held and size + pieces > most:
            yield _slice(index, held)
            held, size = {}, 0
        held[entry.key] = entry
        size += pieces
    if held:
        yield _slice(index, held)


def _slice(index: CheckpointIndex, entries: dict[str, Entry]) -> CheckpointIndex:
    paths = None if index.paths is None else {key: index.path_of(key) for key in entries}
    return replace(index, entries=entries, paths=paths, unreferenced=())


def cut(index: CheckpointIndex, layouts: Sequence[Layout], budget: int) -> dict[str, Cuts]:
    """The bands of every tensor, by its key.

    Args:
        layouts: what will be loaded; all their ranks together hold a band in at most an eighth of ``budget``.
        budget: bytes of memory for the whole load.
    """
    cuts = {}
    for entry in index.tensors:
        copies = max(sum(box.volume for box in layout.boxes(entry.shape, entry.key)) for layout in layouts)
        limit = budget // 8 * math.prod(entry.shape) // max(1, copies)
        cuts[entry.key] = Cuts.of(entry.shape, ITEMSIZE[entry.dtype], max(1, min(BAND, limit)))
    return cuts


def batches(index: CheckpointIndex, cuts: Mapping[str, Cuts], budget: int) -> Iterator[Batch]:
    """Put bands and objects together, in the order of the index.

    Args:
        cuts: bands by key, from `cut`.
        budget: bytes of memory for the whole load; a batch takes an eighth of it unless one item is larger.
    """
    limit = min(BATCH, budget // 8)
    held: list[Band | ObjectNeed] = []
    size = 0
    for item in _items(index, cuts):
        cost = item.cost
        if held and size + cost > limit:
            yield _batch(held)
            held, size = [], 0
        held.append(item)
        size += cost
    if held:
        yield _batch(held)


def _items(index: CheckpointIndex, cuts: Mapping[str, Cuts]) -> Iterator[Band | ObjectNeed]:
    for entry in index.entries.values():
        if isinstance(entry, ObjectEntry):
            yield ObjectNeed(entry)
        else:
            yield from _bands(entry, cuts[entry.key])


def _bands(entry: TensorEntry, cuts: Cuts) -> Iterator[Band]:
    item = ITEMSIZE[entry.dtype]
    needs: list[list[BandNeed]] = [[] for _ in cuts.boxes]
    for number, chunk in enumerate(entry.chunks):
        for band, region in cuts.overlapping(chunk.box):
            # A band is contiguous in the tensor, so what it has of a chunk is contiguous in the chunk.
            span = span_of(region.shifted(chunk.box.offsets), chunk.box.sizes, item)
            needs[band].append(BandNeed(ChunkNeed(entry, chunk, span), band, number, region))
    for number, box in enumerate(cuts.boxes):
        yield Band(entry, number, box, tuple(needs[number]), box.volume * item)


def _batch(items: Sequence[Band | ObjectNeed]) -> Batch:
    return Batch(
        tuple(item for item in items if isinstance(item, Band)),
        tuple(item for item in items if isinstance(item, ObjectNeed)),
    )


def _first_byte(entry: TensorEntry | ObjectEntry) -> tuple[str, int]:
    records: Sequence[Record | None] = (
        [entry.record] if isinstance(entry, ObjectEntry) else entry.chunks.records
    )
    if isinstance(records, RecordColumns):
        return records.first() or ("", 0)
    return min(((r.path, r.offset) for r in records if r is not None), default=("", 0))
