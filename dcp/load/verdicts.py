"""How loaded memory is held against a checkpoint, and what is said where they differ."""

from __future__ import annotations

from typing import Any

from dcp.boxes import Box, intersect
from dcp.findings import Code, Finding, finding
from dcp.index import TensorEntry
from dcp.layout import Layout
from dcp.load.bits import Bits, first_difference, part, same


def compare(memory: Bits, held: Box, bits: Bits, region: Box) -> tuple[Box, list[int]] | None:
    """Hold what a rank loaded against the checkpoint.

    Args:
        memory: the rank's elements of the region ``held``.
        bits: the checkpoint's elements of ``region``; both count from the tensor's origin.

    Returns:
        None if they are alike in all that both hold, else that region and the index of the first
        element that differs.
    """
    common = intersect(region, held)
    if common is None:
        return None
    loaded = part(memory, common.shifted(held.offsets))
    expected = part(bits, common.shifted(region.offsets))
    if same(loaded, expected):
        return None
    place = first_difference(loaded, expected, len(common.offsets))
    return common, [o + p for o, p in zip(common.offsets, place, strict=True)]


def mismatch(entry: TensorEntry, layout: Layout, rank: int, region: Box, first: list[int]) -> Finding:
    """What `compare` found."""
    what = "the checkpoint does not hold what was loaded into"
    return about_region("records.mismatch", what, entry, layout, rank, region, first=first)


def about_region(
    code: Code, what: str, entry: TensorEntry, layout: Layout, rank: int, region: Box, **detail: Any
) -> Finding:
    """A finding about a region of one rank's memory; ``what`` is followed by the region."""
    return finding(
        code,
        f"{entry.key}: {what} {region} on rank {rank} of {layout}",
        key=entry.key,
        rank=rank,
        offsets=list(region.offsets),
        sizes=list(region.sizes),
        **detail,
    )
