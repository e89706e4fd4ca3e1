"""Which regions of a tensor this rank holds, and where in its memory each of them begins.

For plain tensors and most sharded ones that is what torch says. It is not where FSDP2 shards a dimension
that tensor parallelism shards too, which DTensor calls ``_StridedShard``: there a shard may be several runs
of rows, of which torch names the first alone, and so would fill the others with rows from elsewhere.
`shards_of` works such shards out run by run, and refuses those whose memory is not as the placements say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dcp.boxes import Box, Shape
from dcp.errors import CheckpointError
from dcp.layout import shard

Run = tuple[int, int]
"""First index and number of indices along a dimension."""


@dataclass(frozen=True, slots=True)
class HeldRegion:
    """A region of a tensor in this rank's memory."""

    index: MetadataIndex
    """By which torch finds the memory."""
    box: Box
    """The region, in elements of the whole tensor."""
    origin: Shape
    """Where in the memory it begins, in elements."""


def shards_of(key: str, target: Any) -> list[HeldRegion]:
    """This rank's regions of ``target``, the empty ones left out; none where it is no part of its mesh.

    Raises:
        CheckpointError: ``keys.shape``; the memory of a shard has another size than its placements give it.
            ``keys.kind``; what its ranks hold are parts of a sum.
    """
    if isinstance(target, DTensor) and any(place.is_partial() for place in target.placements):
        raise CheckpointError(
            f"{key} of the state dict is a DTensor with a Partial placement, of which every rank holds a "
            "part of a sum: load into one with Replicate or Shard placements",
            code="keys.kind",
            key=key,
        )
    mesh = getattr(target, "device_mesh", None)
    if mesh is not None and mesh.get_coordinate() is None:
        return []
    if isinstance(target, DTensor) and any(isinstance(p, _StridedShard) for p in target.placements):
        return list(_strided(key, target))
    found = []
    for number, chunk in enumerate(_create_chunk_list(target)):
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        if box.volume:
            index = MetadataIndex(key, chunk.offsets, number)
            found.append(HeldRegion(index, box, (0,) * len(box.sizes)))
    return found


def _strided(key: str, target: DTensor) -> Iterator[HeldRegion]:
    coordinate = target.device_mesh.get_coordinate()
    assert coordinate is not None
    runs: list[list[Run]] = [[(0, size)] for size in target.shape]
    for place, parts, placement in zip(coordinate, target.device_mesh.shape, target.placements, strict=True):
        if isinstance(placement, _StridedShard):
            runs[placement.dim] = strided(runs[placement.dim], int(placement.split_factor), parts, place)
        elif isinstance(placement, Shard):
            runs[placement.dim] = strided(runs[placement.dim], 1, parts, place)
    index = MetadataIndex(key, torch.Size([0] * target.ndim), 0)
    held = tuple(sum(size for _, size in dim) for dim in runs)
    memory = tuple(find_tensor_shard(target, index).shape)
    if memory != held:
        raise CheckpointError(
            f"{key}: the shard in memory is {list(memory)}, by its placements {target.placements} it is "
            f"{list(held)}: sizes that tp and fsdp do not divide are sharded in a way that torch cannot "
            "express. Choose other sizes or ranks, or let tp shard another dimension",
            code="keys.shape",
            key=key,
            expected=list(held),
            actual=list(memory),
        )
    for region in product(*(list(_placed(dim)) for dim in runs)):
        offsets, sizes, origin = (tuple(values) for values in zip(*region, strict=True))
        yield HeldRegion(index, Box(offsets, sizes), origin)


def strided(runs: Sequence[Run], factor: int, parts: int, place: int) -> list[Run]:
    """What one of ``parts`` holds of ``runs``: its part of each of ``factor`` pieces, one after the other."""
    total = sum(size for _, size in runs)
    found: list[Run] = []
    for piece in range(factor):
        start, length = shard(total, factor, piece)
        offset, size = shard(length, parts, place)
        for begin, count in _cut(runs, start + offset, size):
            if found and found[-1][0] + found[-1][1] == begin:
                found[-1] = (found[-1][0], found[-1][1] + count)
            else:
                found.append((begin, count))
    return found


def _cut(runs: Sequence[Run], start: int, size: int) -> Iterator[Run]:
    """The runs of ``size`` indices from the one that is number ``start`` of all."""
    for begin, count in runs:
        low, high = max(0, start), min(count, start + size)
        if low < high:
            yield begin + low, high - low
        start -= count


def _placed(runs: Sequence[Run]) -> Iterator[tuple[int, int, int]]:
    """(first index, number of indices, place in memory) of each run."""
    place = 0
    for begin, count in runs:
        yield begin, count, place
        place += count
