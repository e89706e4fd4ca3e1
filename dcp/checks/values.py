"""What the elements themselves look like: NaN, infinities, zeros, norms. Computed as bytes pass by.

`measure` looks at one stretch of elements; `Health` sums up a tensor's. The common case, in which all is
finite, costs one pass of a dot product; only where that is not finite are elements looked at singly.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_FLOATS = {
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "complex32": "<f2",
    "complex64": "<f4",
    "complex128": "<f8",
}
MEASURED = frozenset({*_FLOATS, "bfloat16"})
"""Types whose values are looked at as numbers."""

_BYTE_FLOATS: dict[str, tuple[frozenset[int], frozenset[int]]] = {
    "float8_e4m3fn": (frozenset({0x7F, 0xFF}), frozenset()),
    "float8_e4m3fnuz": (frozenset({0x80}), frozenset()),
    "float8_e5m2": (frozenset({*range(0x7D, 0x80), *range(0xFD, 0x100)}), frozenset({0x7C, 0xFC})),
    "float8_e5m2fnuz": (frozenset({0x80}), frozenset()),
    "float8_e8m0fnu": (frozenset({0xFF}), frozenset()),
}
"""NaN and infinite encodings of one-byte types, which are scaled stand-ins: their norms say nothing."""

LOOKED_AT = MEASURED | _BYTE_FLOATS.keys()
"""Types in which NaN and infinities are counted."""


@dataclass(slots=True)
class Health:
    """Values of a tensor, or of the part seen so far. Counts are in elements (a complex one has two)."""

    elements: int = 0
    nan: int = 0
    inf: int = 0
    squares: float = 0.0
    """Sum of the squares of the finite elements."""

    def add(self, other: Health) -> None:
        """Join what was seen elsewhere."""
        self.elements += other.elements
        self.nan += other.nan
        self.inf += other.inf
        self.squares += other.squares

    @property
    def norm(self) -> float:
        """Euclidean norm of the finite elements."""
        return sqrt(self.squares)

    @property
    def zero(self) -> bool:
        """Whether every element is zero."""
        return self.elements > 0 and not self.nan and not self.inf and self.squares == 0.0


def measure(data: memoryview, dtype: str) -> Health:
    """Look at a stretch of elements.

    Args:
        data: whole elements in any order.
        dtype: torch's name, one of `LOOKED_AT`.
    """
    if dtype in _BYTE_FLOATS:
        return _count(data, *_BYTE_FLOATS[dtype])
    step = 1 << 18
    health = Health()
    raw = _raw(data, dtype)
    for start in range(0, len(raw), step):
        part = raw[start : start + step]
        _measure(_widened(part, dtype), health)
    return health


def _count(data: memoryview, nan: frozenset[int], inf: frozenset[int]) -> Health:
    """NaN and infinities among one-byte elements, by how often each byte stands there."""
    import numpy as np

    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    return Health(len(data), int(counts[list(nan)].sum()), int(counts[list(inf)].sum()))


def as_numbers(data: memoryview, dtype: str) -> NDArray[np.floating]:
    """Elements of one of the `MEASURED` types as numbers; a complex one gives two."""
    return _widened(_raw(data, dtype), dtype)


def _raw(data: memoryview, dtype: str) -> NDArray[np.generic]:
    import numpy as np

    return np.frombuffer(data, "<u2" if dtype == "bfloat16" else _FLOATS[dtype])


def _widened(part: NDArray[np.generic], dtype: str) -> NDArray[np.floating]:
    """Elements as a type that numpy computes with at speed."""
    import numpy as np

    if dtype == "bfloat16":
        return (part.astype(np.uint32) << 16).view(np.float32)
    if dtype in ("float16", "complex32"):
        return part.astype(np.float32)
    return part.astype(part.dtype, copy=False)


def _measure(values: NDArray[np.floating], health: Health) -> None:
    import numpy as np

    health.elements += len(values)
    with np.errstate(over="ignore", invalid="ignore"):
        squares = float(np.dot(values, values))
    if isfinite(squares) and (squares > 0.0 or not values.any()):
        health.squares += squares
        return
    # Not finite, overflown, or vanished: this stretch has to be looked at element by element.
    finite = values[np.isfinite(values)].astype(np.float64)
    health.nan += int(np.isnan(values).sum())
    health.inf += len(values) - len(finite) - int(np.isnan(values).sum())
    with np.errstate(over="ignore"):
        total = float(np.dot(finite, finite))
    health.squares += max(total, 5e-324) if finite.any() else 0.0
