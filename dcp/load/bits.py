"""Bytes of a chunk and memory of a tensor as arrays of plain integers, to be copied and compared bit by bit.

Integers keep what arithmetic types would lose: NaN payloads, signs of zero, odd bytes in a bool. numpy
reads them at any alignment, which torch does not. Types of 16 bytes get a last dimension of two.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from dcp.boxes import Box, Shape
from dcp.load.regions import strides

Bits = npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.uint32] | npt.NDArray[np.uint64]

_NUMPY: dict[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_TORCH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: torch.Tensor) -> Bits:
    """The memory of a plain CPU tensor, shared: what is written to the array is in the tensor.

    Conjugation and negation marks must be resolved.
    """
    tensor = tensor.detach()
    if tensor.element_size() == 16:
        return torch.view_as_real(tensor).view(torch.int64).numpy().view(np.uint64)
    size = tensor.element_size()
    return tensor.view(_TORCH[size]).numpy().view(_NUMPY[size])


def bits_in(data: bytes | memoryview, start: int, box: Box, shape: Shape, itemsize: int) -> Bits:
    """The region ``box`` of a C-ordered chunk of ``shape``, whose first byte is at ``start`` of ``data``.

    The array is read-only and shares the bytes. ``data`` must hold everything between the region's first
    and last element.
    """
    steps = tuple(step * itemsize for step in strides(shape))
    sizes = box.sizes
    if itemsize == 16:
        sizes, steps, itemsize = (*sizes, 2), (*steps, 8), 8
    return np.ndarray(sizes, _NUMPY[itemsize], data, start, steps)


def is_bits(value: object) -> TypeGuard[Bits]:
    """Whether it is an array of bits and not what was got in the place of one."""
    return isinstance(value, np.ndarray)


def part(bits: Bits, box: Box) -> Bits:
    """The region ``box`` of an array whose origin is the box's."""
    # The ellipsis keeps a scalar an array.
    where: Any = (*(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True)), ...)
    region: Bits = bits[where]
    return region


def same(a: Bits, b: Bits) -> bool:
    """Whether two arrays of one shape hold the same bits."""
    if a.flags.c_contiguous and b.flags.c_contiguous and a.nbytes % 8 == 0:
        a, b = a.reshape(-1).view(np.uint64), b.reshape(-1).view(np.uint64)
    return np.array_equal(a, b)


def first_difference(a: Bits, b: Bits, dims: int) -> Shape:
    """Index of the first element, in the ``dims`` dimensions of the tensor, that is not alike in both."""
    place = np.argwhere(np.not_equal(a, b))[0]
    return tuple(int(i) for i in place[:dims])
