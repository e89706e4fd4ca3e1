"""The pictures on a run's page: sizes, what stages took, how much changed, and norms, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flows.report.charts import WIDTH, Bar, Line, Scale, Tick, bars, line, stacked
from flows.report.runs import StepFact
from flows.text import human_bytes, human_seconds, plural

MOST = 120
"""Steps in a chart, the newest."""
_FEWEST = 2
_KINDS = ("first", "second", "third", "fourth", "fifth", "sixth")


@dataclass(frozen=True, slots=True)
class StepChart:
    """Bars or lines over steps. ``top`` says what the full height is; ``keys`` are (kind, label)."""

    title: str
    said: str
    """What is seen, in words."""
    top: str
    bars: tuple[Bar, ...]
    lines: tuple[Line, ...]
    across: tuple[Tick, ...]
    keys: tuple[tuple[str, str], ...]


def step_charts(steps: Sequence[StepFact]) -> tuple[StepChart, ...]:
    """Every chart for which there is something to draw."""
    shown = steps[-MOST:]
    if len(shown) < _FEWEST:
        return ()
    drawn = (_sizes(shown), _durations(shown), _intervals(shown), _changed(shown), _norms(shown))
    return tuple(chart for chart in drawn if chart is not None)


def _across(steps: Sequence[StepFact]) -> tuple[Tick, ...]:
    step = WIDTH / len(steps)
    every = -(-len(steps) // 8)
    return tuple(
        Tick(round((i + 0.5) * step, 1), str(each.number)) for i, each in enumerate(steps) if i % every == 0
    )


def _simple(
    steps: Sequence[StepFact],
    title: str,
    values: Sequence[float],
    show: Callable[[float], str],
    said: str,
) -> StepChart | None:
    if not any(values):
        return None
    drawn = bars(values, [f"{s.name}: {show(v)}" for s, v in zip(steps, values, strict=True)])
    kinds = ["bad" if s.state in ("problem", "failing") else "" for s in steps]
    marked = tuple(
        Bar(b.x, b.y, b.width, b.height, b.label, kind) for b, kind in zip(drawn, kinds, strict=True)
    )
    keys = (("first", "fine"), ("bad", "with a problem")) if any(kinds) else ()
    return StepChart(title, said, show(max(values)), marked, (), _across(steps), keys)


def _sizes(steps: Sequence[StepFact]) -> StepChart | None:
    values = [float(step.bytes) for step in steps]
    sound = sorted(v for v in values if v) or [0.0]
    said = f"from {human_bytes(sound[0])} to {human_bytes(sound[-1])}"
    return _simple(steps, "Size of each step", values, human_bytes, said)


def _intervals(steps: Sequence[StepFact]) -> StepChart | None:
    values = [step.interval or 0.0 for step in steps]
    return _simple(
        steps, "Time since the step before", values, human_seconds, f"at most {human_seconds(max(values))}"
    )


def _durations(steps: Sequence[StepFact]) -> StepChart | None:
    stages = [stage.stage for stage in steps[-1].stages]
    rows = [
        [(_KINDS[i % len(_KINDS)], stage.seconds or 0.0) for i, stage in enumerate(step.stages)]
        for step in steps
    ]
    labels = [
        [f"{step.name}, {stage.stage}: {human_seconds(stage.seconds or 0.0)}" for stage in step.stages]
        for step in steps
    ]
    most = max(sum(value for _, value in row) for row in rows)
    if not most:
        return None
    keys = tuple((_KINDS[i % len(_KINDS)], stage) for i, stage in enumerate(stages))
    said = f"at most {human_seconds(most)} for a step"
    return StepChart(
        "What the stages took", said, human_seconds(most), stacked(rows, labels), (), _across(steps), keys
    )


def _changed(steps: Sequence[StepFact]) -> StepChart | None:
    known = [step for step in steps if step.unchanged is not None and step.tensors]
    if not known:
        return None
    values = [float(step.unchanged or 0) for step in known]
    title = "Tensors that did not change since the published step before"
    worst = max(known, key=lambda step: step.unchanged or 0)
    if not any(values):
        said = "every tensor changed in every step"
        return StepChart(title, said, "", (), (), (), ())
    said = f"most in {worst.name}: {worst.unchanged} of {plural(worst.tensors or 0, 'tensor')}"
    top = float(max(step.tensors or 0 for step in known))
    drawn = bars(
        values,
        [f"{s.name}: {s.unchanged} of {s.tensors} unchanged" for s in known],
        top,
    )
    return StepChart(title, said, f"{top:.0f}", drawn, (), _across(known), ())


def _norms(steps: Sequence[StepFact]) -> StepChart | None:
    known = [step for step in steps if step.norms]
    if len(known) < _FEWEST:
        return None
    last: dict[str, float] = {}
    for step in known:
        last |= step.norms
    groups = sorted(last, key=lambda group: -last[group])[: len(_KINDS)]
    scale = Scale.of([step.norms[group] for step in known for group in groups if group in step.norms])
    lines = []
    for kind, group in zip(_KINDS, groups, strict=False):
        points = [
            ((i + 0.5) / len(known), scale.at(step.norms[group]), f"{step.name}: {step.norms[group]:.4g}")
            for i, step in enumerate(known)
            if group in step.norms
        ]
        lines.append(line(points, kind, group))
    keys = tuple(zip(_KINDS, groups, strict=False))
    return StepChart(
        "Norms by first part of the key, logarithmic",
        f"{plural(len(known), 'scrubbed step')}",
        f"{scale.high:g}",
        (),
        tuple(lines),
        _across(known),
        keys,
    )
