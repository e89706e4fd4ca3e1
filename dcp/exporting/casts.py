"""Floating tensors in another floating type, bit for bit as torch's ``.to()`` gives them.

The casts that nearly all exports want, of float32 or bfloat16 to a half precision, and those that only widen
are done here; any other loads torch. A narrower type can be too small for a number, which then becomes
infinite: those are counted on the way, while the bytes are in the core's cache. What torch itself leaves open
stays open: in a cast from float64 to bfloat16 the bits of a NaN depend on its position.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from dcp.dtypes import FLOATING
from dcp.exporting.report import ExportedTensor
from dcp.findings import Finding, finding

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK = 1 << 15
"""Elements cast at a time, so that what is in between stays in the core's cache."""
_ALONE = frozenset(
    {
        ("float32", "bfloat16"),
        ("float32", "float16"),
        ("bfloat16", "float16"),
        ("bfloat16", "float32"),
        ("bfloat16", "float64"),
        ("float32", "float64"),
    }
)
_MAGNITUDE = 0x7FFFFFFF
_INFINITE = 0x7F800000
_TOO_LARGE = 0x7F7F8000
"""Bits of a float32 without its sign: infinity, and the smallest that a bfloat16 cannot hold."""
_INFINITE_HALF, _QUIET_NAN_HALF = 0x7C00, 0x7E00
"""Bits of a float16: infinity, and those that every quiet NaN has."""


def output_dtype(dtype: str, wanted: str | None) -> str:
    """What a tensor of type ``dtype`` becomes: ``wanted`` for a real floating type, itself for any other."""
    castable = dtype in FLOATING and not dtype.startswith(("complex", "float4"))
    return wanted if wanted is not None and castable else dtype


def needs_torch(source: str, target: str) -> bool:
    """Whether the cast is torch's."""
    return source != target and (source, target) not in _ALONE


def cast(view: memoryview, source: str, target: str) -> tuple[memoryview, int]:
    """Elements of type ``source`` as new bytes of type ``target``; how many of finite became infinite."""
    if needs_torch(source, target):
        return _by_torch(view, source, target)
    import numpy as np

    if target == "bfloat16":
        out, overflowed = _to_bfloat16(np.frombuffer(view, np.uint32))
        return _bytes(out), overflowed
    bits = np.frombuffer(view, np.uint32 if source == "float32" else np.uint16)
    if source == "bfloat16":
        bits = bits.astype(np.uint32) << 16
    if target == "float16":
        out, overflowed = _to_float16(bits.view(np.float32))
        return _bytes(out), overflowed
    if target == "float32":
        return _bytes(bits), 0
    # numpy says so when it meets a NaN.
    with np.errstate(invalid="ignore"):
        return _bytes(bits.view(np.float32).astype(np.float64)), 0


def overflows(tensors: Mapping[str, ExportedTensor], names: Mapping[str, str]) -> list[Finding]:
    """A warning for every tensor whose new type was too small for some of its numbers.

    Args:
        tensors: what was written, by name in the output.
        names: key in the checkpoint -> name in the output.
    """
    return [
        finding(
            "export.overflow",
            f"{key}: {tensor.overflowed:,} of {prod(tensor.shape):,} values were finite as "
            f"{tensor.cast_from} and are infinite as {tensor.dtype}",
            key=key,
            count=tensor.overflowed,
            dtype=tensor.dtype,
            cast_from=tensor.cast_from,
        )
        for key, name in names.items()
        if (tensor := tensors.get(name)) is not None and tensor.overflowed
    ]


def _to_bfloat16(bits: NDArray[Any]) -> tuple[NDArray[Any], int]:
    """To the nearest, ties to even; every NaN becomes the one that torch's vector code writes."""
    import numpy as np

    out = np.empty(len(bits), np.uint16)
    spare = np.empty(min(_BLOCK, len(bits)), np.uint32)
    overflowed = 0
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
        np.bitwise_and(block, _MAGNITUDE, out=rounded)
        largest = rounded.max()
        if largest >= _TOO_LARGE:
            overflowed += int(np.count_nonzero((rounded >= _TOO_LARGE) & (rounded < _INFINITE)))
        if largest > _INFINITE:
            target[rounded > _INFINITE] = 0xFFFF
    return out, overflowed


def _to_float16(values: NDArray[Any]) -> tuple[NDArray[Any], int]:
    """To the nearest, ties to even; NaNs are quiet and keep their upper bits, as torch's do."""
    import numpy as np

    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        out: NDArray[Any] = values.astype(np.float16).view(np.uint16)
    magnitudes = out & 0x7FFF
    if not len(out) or magnitudes.max() < _INFINITE_HALF:
        return out, 0
    undefined = magnitudes > _INFINITE_HALF
    bits = values.view(np.uint32)[undefined]
    out[undefined] = (bits >> 16 & 0x8000) | _QUIET_NAN_HALF | (bits >> 13 & 0x3FF)
    return out, int(np.count_nonzero(magnitudes == _INFINITE_HALF)) - int(np.count_nonzero(np.isinf(values)))


def _by_torch(view: memoryview, source: str, target: str) -> tuple[memoryview, int]:
    import torch

    elements = torch.frombuffer(view, dtype=getattr(torch, source))
    kind = getattr(torch, target)
    out = elements.to(kind)
    overflowed = 0
    # Every float8 fits into what it can be cast to.
    if elements.itemsize > 1 and torch.finfo(elements.dtype).max > torch.finfo(kind).max:
        overflowed = int(out.isinf().sum())
        if overflowed:
            overflowed -= int(elements.isinf().sum())
    return _bytes(out.view(torch.uint8).numpy()), overflowed


def _bytes(array: NDArray[Any]) -> memoryview:
    return array.data.cast("B")
