"""Reads that put an `Assembly` into a rank's shards, in torch's terms.

A read item's lengths count along the saved tensor's dimensions, which is how storage readers cut the saved
chunk; its destination offsets count along the target's. Where the two orders differ, the item's order is kept
beside it, and `view_of` turns the target so that both sides have the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import add
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import find_tensor_shard

from dcp.boxes import Box, check_tiling, intersect
from dcp.errors import CheckpointError
from dcp.findings import Finding, finding
from dcp.load.assembly import Assembly, Part
from dcp.load.metadata import torch_chunk
from dcp.load.regions import moved
from dcp.load.shards import HeldRegion, shards_of

_NOTHING = torch.Size((0,))


@dataclass(slots=True)
class TensorPlan:
    """What one rank reads for one tensor."""

    items: list[ReadItem] = field(default_factory=list)
    orders: dict[ReadItem, tuple[int, ...]] = field(default_factory=dict)
    """`Part.order` of the items whose dimensions stand in another order than the target's."""
    findings: list[Finding] = field(default_factory=list)


def object_item(key: str, source: str) -> ReadItem:
    """The read of the object saved as ``source`` into ``key``."""
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=MetadataIndex(key),
        dest_offsets=_NOTHING,
        storage_index=MetadataIndex(source),
        storage_offsets=_NOTHING,
        lengths=_NOTHING,
    )


def items_of(key: str, target: Any, assembly: Assembly, metadata: Metadata) -> TensorPlan:
    """The reads that fill this rank's shards of ``target``.

    Regions that the checkpoint's chunks do not fill, or fill twice, are findings; so are shards whose memory
    is not what torch says of them.
    """
    plan = TensorPlan()
    try:
        held = shards_of(key, target)
    except CheckpointError as error:
        plan.findings.append(error.as_finding())
        return plan
    for shard in held:
        own = shard.box
        written = [c.shifted(own.offsets) for f in assembly.fills if (c := intersect(f.box, own))]
        for part in assembly.parts:
            found = part.within(own)
            if found is not None:
                written += _read(plan, shard, part, *found, metadata)
        tiling = check_tiling(own.sizes, written)
        for gap in tiling.gaps:
            message = f"{key}: no chunk of the checkpoint holds {moved(gap, own.offsets)}"
            plan.findings.append(finding("tiling.gap", message, key=key, region=str(moved(gap, own.offsets))))
        for _, _, common in tiling.overlaps:
            message = f"{key}: several chunks of the checkpoint hold {moved(common, own.offsets)}"
            plan.findings.append(finding("tiling.overlap", message, key=key))
    return plan


def _read(
    plan: TensorPlan, shard: HeldRegion, part: Part, common: Box, saved: Box, metadata: Metadata
) -> list[Box]:
    """Add the reads of one part, and say which places of the shard's region they write."""
    held = metadata.state_dict_metadata[part.source]
    assert isinstance(held, TensorStorageMetadata)
    inside = common.shifted(shard.box.offsets).offsets
    written = []
    for read in create_read_items_for_chunk_list(part.source, held, [torch_chunk(saved)]):
        place = tuple(o + read.dest_offsets[part.order[d]] for d, o in enumerate(inside))
        item = ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=shard.index,
            dest_offsets=torch.Size(map(add, place, shard.origin)),
            storage_index=read.storage_index,
            storage_offsets=read.storage_offsets,
            lengths=read.lengths,
        )
        plan.items.append(item)
        if part.order != tuple(range(len(part.order))):
            plan.orders[item] = part.order
        written.append(Box(place, tuple(read.lengths[saved_dim] for saved_dim in part.order)))
    return written


def view_of(shard: torch.Tensor, item: ReadItem, order: tuple[int, ...]) -> torch.Tensor:
    """The region of a shard that an item writes, with its dimensions in the saved tensor's order."""
    for dim, saved in enumerate(order):
        shard = shard.narrow(dim, item.dest_offsets[dim], item.lengths[saved])
    return shard.permute(tuple(order.index(saved) for saved in range(len(order))))


def fill(target: Any, assembly: Assembly) -> None:
    """Write the constant regions of a tensor into this rank's shards."""
    if not assembly.fills:
        return
    for shard in shards_of("", target):
        memory = find_tensor_shard(target, shard.index).detach()
        for each in assembly.fills:
            common = intersect(each.box, shard.box)
            if common is None:
                continue
            region = memory
            local = moved(common.shifted(shard.box.offsets), shard.origin)
            for dim, (offset, size) in enumerate(zip(local.offsets, local.sizes, strict=True)):
                region = region.narrow(dim, offset, size)
            region.fill_(each.value)
