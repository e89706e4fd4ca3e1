"""Numbers as geometry: what the templates draw as SVG, in a coordinate system of ``WIDTH`` by ``HEIGHT``.

Pure arithmetic; colours, text and layout belong to the templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log2

WIDTH = 720.0
HEIGHT = 200.0

_WIDEST = 72.0
"""Width of a bar where there are few."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle with its lower edge at ``HEIGHT`` or on another bar; ``label`` says what it is."""

    x: float
    y: float
    width: float
    height: float
    label: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """Joined points; ``path`` is SVG path data. ``kind`` chooses its look, ``label`` names it."""

    path: str
    points: tuple[tuple[float, float, str], ...]
    kind: str
    label: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis at ``at``, along the axis."""

    at: float
    label: str


def bars(values: Sequence[float], labels: Sequence[str], top: float | None = None) -> tuple[Bar, ...]:
    """One bar a value, side by side; ``top`` is the value of the full height."""
    most = top or max(values, default=0.0) or 1.0
    step, gap = _spacing(len(values))
    return tuple(
        Bar(
            x=round(i * step + gap / 2, 2),
            y=round(HEIGHT - HEIGHT * value / most, 2),
            width=round(step - gap, 2),
            height=round(HEIGHT * value / most, 2),
            label=label,
        )
        for i, (value, label) in enumerate(zip(values, labels, strict=True))
    )


def _spacing(count: int) -> tuple[float, float]:
    """Distance between the left edges of bars, and how much of it is left empty."""
    step = WIDTH / max(1, count)
    return step, max(min(step * 0.2, 6.0), step - _WIDEST)


def stacked(rows: Sequence[Sequence[tuple[str, float]]], labels: Sequence[Sequence[str]]) -> tuple[Bar, ...]:
    """Bars of several (kind, value) parts on top of each other."""
    most = max((sum(value for _, value in row) for row in rows), default=0.0) or 1.0
    step, gap = _spacing(len(rows))
    found = []
    for i, (row, said) in enumerate(zip(rows, labels, strict=True)):
        below = 0.0
        for (kind, value), label in zip(row, said, strict=True):
            height = HEIGHT * value / most
            below += height
            if height > 0:
                found.append(
                    Bar(
                        x=round(i * step + gap / 2, 2),
                        y=round(HEIGHT - below, 2),
                        width=round(step - gap, 2),
                        height=round(height, 2),
                        label=label,
                        kind=kind,
                    )
                )
    return tuple(found)


def outline(values: Sequence[float], top: float) -> str:
    """Path of a filled outline of very many bars."""
    step = WIDTH / max(1, len(values))
    parts = [f"M0 {HEIGHT:g}"]
    for i, value in enumerate(values):
        y = round(HEIGHT - HEIGHT * value / (top or 1.0), 2)
        parts.append(f"L{round(i * step, 2):g} {y:g}L{round((i + 1) * step, 2):g} {y:g}")
    return "".join(parts) + f"L{WIDTH:g} {HEIGHT:g}Z"


@dataclass(frozen=True, slots=True)
class Scale:
    """A logarithmic axis from ``low`` to ``high``, both powers of two."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Scale:
        """The axis that holds all positive values."""
        sound = [value for value in values if value > 0 and isfinite(value)] or [1.0]
        low, high = floor(log2(min(sound))), ceil(log2(max(sound)))
        return cls(2.0**low, 2.0 ** max(high, low + 1))

    def at(self, value: float) -> float:
        """Where a value stands: 0 at the low end, 1 at the high one."""
        return (log2(max(value, self.low)) - log2(self.low)) / (log2(self.high) - log2(self.low))

    def ticks(self, most: int = 5) -> tuple[float, ...]:
        """Powers of two, at most ``most`` of them or one more."""
        first, last = round(log2(self.low)), round(log2(self.high))
        step = max(1, ceil((last - first) / most))
        return tuple(2.0**power for power in range(first, last + 1, step))


def line(points: Sequence[tuple[float, float, str]], kind: str, label: str) -> Line:
    """A line through points given from 0 to 1 along both axes, upwards, each with what it says."""
    placed = tuple((round(x * WIDTH, 1), round(HEIGHT - y * HEIGHT, 1), said) for x, y, said in points)
    path = "".join(f"{'L' if i else 'M'}{x:g} {y:g}" for i, (x, y, _) in enumerate(placed))
    return Line(path, placed, kind, label)
