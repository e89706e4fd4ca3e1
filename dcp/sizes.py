"""Counts of bytes and seconds as people read them, and bytes as options take them."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def human_bytes(count: float) -> str:
    """``1.5 MiB`` for 1572864 bytes."""
    unit = 0
    while abs(count) >= 1023.95 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def mebibytes(count: int) -> str:
    """``2MiB`` for 1572864 bytes: rounded up, and fit for an option."""
    return f"{-(-count // (1 << 20))}MiB"


def human_span(seconds: float) -> str:
    """``3 days``, ``5 h``, ``12 min``, ``40 s`` or ``less than 1 s``."""
    if 0 <= seconds < 1:
        return "less than 1 s"
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
