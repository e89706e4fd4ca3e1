"""Floating tensors in another floating type, bit for bit as torch's ``.to()`` gives them.

The cast that nearly all exports want, float32 to bfloat16, and those that only widen are done on the bits;
any other loads torch. What torch itself leaves open stays open: in a cast from float64 to bfloat16 the bits
of a NaN depend on its position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcp.dtypes import FLOATING

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK = 1 << 15
"""Elements cast at a time, so that what is in between stays in the core's cache."""
_ALONE = frozenset(
    {
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("bfloat16", "float64"),
        ("float32", "float64"),
    }
)


def output_dtype(dtype: str, wanted: str | None) -> str:
    """What a tensor of type ``dtype`` becomes: ``wanted`` for a real floating type, itself for any other."""
    castable = dtype in FLOATING and not dtype.startswith(("complex", "float4"))
    return wanted if wanted is not None and castable else dtype


def needs_torch(source: str, target: str) -> bool:
    """Whether the cast is torch's."""
    return source != target and (source, target) not in _ALONE


def cast(view: memoryview, source: str, target: str) -> memoryview:
    """Elements of type ``source`` as new bytes of type ``target``."""
    if needs_torch(source, target):
        return _by_torch(view, source, target)
    import numpy as np

    if target == "bfloat16":
        return _bytes(_to_bfloat16(np.frombuffer(view, np.uint32)))
    bits = np.frombuffer(view, np.uint32 if source == "float32" else np.uint16)
    if source == "bfloat16":
        bits = bits.astype(np.uint32) << 16
    if target == "float32":
        return _bytes(bits)
    # numpy says so when it meets a NaN.
    with np.errstate(invalid="ignore"):
        return _bytes(bits.view(np.float32).astype(np.float64))


def _to_bfloat16(bits: NDArray[Any]) -> NDArray[Any]:
    """To the nearest, ties to even; every NaN becomes the one that torch's vector code writes."""
    import numpy as np

    out = np.empty(len(bits), np.uint16)
    spare = np.empty(min(_BLOCK, len(bits)), np.uint32)
    for start in range(0, len(bits), _BLOCK):
        block = bits[start : start + _BLOCK]
        rounded = spare[: len(block)]
        np.right_shift(block, 16, out=rounded)
        rounded &= 1
        rounded += 0x7FFF
        rounded += block
        rounded >>= 16
        target = out[start : start + _BLOCK]
        target[:] = rounded
        np.bitwise_and(block, 0x7FFFFFFF, out=rounded)
        if rounded.max() > 0x7F800000:
            target[rounded > 0x7F800000] = 0xFFFF
    return out


def _by_torch(view: memoryview, source: str, target: str) -> memoryview:
    import torch

    elements = torch.frombuffer(view, dtype=getattr(torch, source))
    return _bytes(elements.to(getattr(torch, target)).view(torch.uint8).numpy())


def _bytes(array: NDArray[Any]) -> memoryview:
    return array.data.cast("B")
