"""Numbers and text small enough to travel inside a page: columns, differences, deflate, base64.

What is packed here is unpacked by ``templates/report/js/data.js`` when somebody asks for it.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

EXACT = 1 << 53
"""Integers from here on are not exact in a browser."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Columns of equal length. ``data`` is base64 of deflated differences, column after column."""

    columns: int
    rows: int
    wide: bool
    """Differences are 64-bit floats; otherwise 32-bit integers. Both little-endian."""
    data: str


def pack_columns(columns: Sequence[Ints]) -> Packed:
    """Pack integer columns, each below `EXACT`; the first difference of a column is its first value."""
    import numpy as np

    rows = len(columns[0]) if columns else 0
    steps = np.diff(np.stack(columns), axis=1, prepend=0) if rows else np.zeros((len(columns), 0), np.int64)
    wide = bool(steps.size) and bool((np.abs(steps) > 0x7FFFFFFF).any())
    data = steps.astype("<f8" if wide else "<i4").tobytes()
    return Packed(columns=len(columns), rows=rows, wide=wide, data=deflated(data))


def pack_json(value: Any) -> str:
    """A JSON value, deflated, in base64."""
    return deflated(json.dumps(value, separators=(",", ":"), allow_nan=False).encode())


def deflated(data: bytes) -> str:
    """Base64 of a zlib stream, which browsers call ``deflate``."""
    return base64.b64encode(zlib.compress(data, 6)).decode()
