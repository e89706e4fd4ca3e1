"""How loaded memory is held against a checkpoint, and what is said where they differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dcp.boxes import Box, intersect
from dcp.findings import Code, Finding, finding
from dcp.index import TensorEntry
from dcp.layout import Layout
from dcp.load.bits import Bits, first_difference, part, same

_MANY = 4
"""Chunks of a band from which on they are put together before they are compared with many ranks' memory."""


def joined(band: Box, arrived: Sequence[tuple[Box, Bits]]) -> Sequence[tuple[Box, Bits]]:
    """What the checkpoint holds of a band, in as few arrays as is worth it.

    Where the chunks are many and fill the band, that is one array: to compare each rank's memory with each
    of many small chunks would take longer than to copy them.
    """
    filled = sum(region.volume for region, _ in arrived)
    if len(arrived) < _MANY or filled != band.volume:
        return arrived
    first = arrived[0][1]
    whole = np.empty((*band.sizes, *first.shape[len(band.sizes) :]), first.dtype)
    for region, bits in arrived:
        part(whole, region.shifted(band.offsets))[...] = bits
    return [(band, whole)]


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
