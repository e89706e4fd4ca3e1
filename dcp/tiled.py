"""Proof on arrays that boxes tile a shape, for the many indices in which they simply do.

`is_tiled` never accuses: where it cannot prove it, `dcp.boxes.check_tiling` looks closer and names faults.
"""

from __future__ import annotations

from math import prod

import numpy as np

from dcp.boxes import Shape
from dcp.columns import BoxColumns

_LIMIT = 1 << 62
"""Numbers below this can be multiplied out and added up once without leaving 64 bits."""


def is_tiled(shape: Shape, boxes: BoxColumns) -> bool:
    """Whether ``boxes`` are proven to cover ``shape`` exactly once: distinct cells of a grid that fill it."""
    offsets, sizes = boxes.offsets, boxes.sizes
    elements = prod(shape)
    if offsets.shape[1] != len(shape) or max(elements, *shape, 0) >= _LIMIT:
        return False
    extent = np.array(shape, np.int64)
    if (offsets < 0).any() or (sizes < 0).any() or (sizes > extent).any():
        return False
    if (offsets > extent - sizes).any():
        return False
    if elements == 0:
        return True
    solid = (sizes > 0).all(axis=1)
    if not solid.all():
        offsets, sizes = offsets[solid], sizes[solid]
    volumes = sizes.prod(axis=1)
    # As floats first: boxes that overlap could add up to more than 64 bits hold.
    if volumes.sum(dtype=np.float64) >= _LIMIT or int(volumes.sum()) != elements:
        return False
    cell = np.zeros(len(offsets), np.int64)
    cells = 1
    for dim in range(len(shape)):
        starts, where = np.unique(offsets[:, dim], return_inverse=True)
        if len(starts) == 1:
            continue
        width = np.zeros(len(starts), np.int64)
        width[where] = sizes[:, dim]
        if (width[where] != sizes[:, dim]).any() or (starts[:-1] + width[:-1] > starts[1:]).any():
            return False
        cells *= len(starts)
        if cells >= _LIMIT:
            return False
        cell = cell * len(starts) + where
    return len(np.unique(cell)) == len(cell)
