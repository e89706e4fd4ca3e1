"""The pictures on a checkpoint's page: bytes by rank, and what loads read."""

from __future__ import annotations

from dataclasses import dataclass

from flows.report.charts import HEIGHT, WIDTH, Bar, Line, Scale, Tick, bars, line, outline
from flows.report.costs import PartCosts
from flows.report.shares import Shares
from flows.text import human_bytes, plural

_LEVEL = 1.02
"""Up to this ratio of the heaviest rank to the mean, many bars would all look alike and say nothing."""
_FEW = 16
_SINGLE = 64
"""Up to so many ranks each is a bar of its own; more of them are one outline."""


@dataclass(frozen=True, slots=True)
class RankChart:
    """Bytes by rank. ``mean`` is the height of the mean's line; one of ``bars`` and ``outline`` is empty."""

    bars: tuple[Bar, ...]
    outline: str
    mean: float
    ticks: tuple[Tick, ...]
    top: str


@dataclass(frozen=True, slots=True)
class LoadChart:
    """Bytes that the slowest rank reads, by number of ranks, both logarithmic."""

    lines: tuple[Line, ...]
    across: tuple[Tick, ...]
    up: tuple[Tick, ...]


def rank_chart(shares: Shares) -> RankChart | None:
    """None where there is nothing to see: fewer than two ranks, or many of them all alike."""
    if len(shares.ranks) < 2 or (len(shares.ranks) > _FEW and shares.imbalance <= _LEVEL):
        return None
    values = [float(each.bytes) for each in shares.ranks]
    top = max(values) or 1.0
    single = len(values) <= _SINGLE
    labels = [
        f"rank {each.rank}: {human_bytes(each.bytes)} in {plural(each.files, 'file')}"
        for each in shares.ranks
    ]
    step = WIDTH / len(values)
    every = max(1, -(-len(values) // 16))
    return RankChart(
        bars=bars(values, labels) if single else (),
        outline="" if single else outline(values, top),
        mean=round(HEIGHT - HEIGHT * shares.mean / top, 2),
        ticks=tuple(
            Tick(round((i + 0.5) * step, 2), str(each.rank))
            for i, each in enumerate(shares.ranks)
            if i % every == 0
        ),
        top=human_bytes(top),
    )


def load_chart(part: PartCosts) -> LoadChart | None:
    """None where there are too few numbers of ranks for a line."""
    costs = part.costs
    if len(costs) < 2:
        return None
    scale = Scale.of([float(v) for each in costs for v in (each.slowest, each.torch_slowest) if v])
    across = Scale.of([float(each.ranks) for each in costs])
    ours = [
        (across.at(c.ranks), scale.at(c.slowest), f"{c.ranks} ranks: {human_bytes(c.slowest)}") for c in costs
    ]
    torch = [
        (across.at(c.ranks), scale.at(c.torch_slowest), f"{c.ranks} ranks: {human_bytes(c.torch_slowest)}")
        for c in costs
    ]
    return LoadChart(
        # The dashed one on top, or it would not be seen where both read the same.
        lines=(line(ours, "first", "dcp.BucketReader"), line(torch, "second", "torch’s reader")),
        across=tuple(Tick(round(across.at(c.ranks) * WIDTH, 1), str(c.ranks)) for c in costs),
        up=tuple(
            Tick(round(HEIGHT - scale.at(value) * HEIGHT, 1), human_bytes(value).replace(".0 ", " "))
            for value in scale.ticks()
        ),
    )
