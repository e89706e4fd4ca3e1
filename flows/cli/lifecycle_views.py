"""What a person sees of passes and steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flows.cli.output import Output
from flows.text import human_seconds, name, plural, problem_name

if TYPE_CHECKING:
    from flows.passes import PassReport
    from flows.workshop import StepReport
    from tasks.alert import AlertReport

_MOST_NAMES = 10


def show_step(out: Output, report: StepReport) -> None:
    """One step: its outcome, its stages, what went wrong, who was told."""
    style = {"published": "good", "problem": "bad"}.get(report.outcome, "warning")
    out.line(f"{name(report.run)} {name(report.step)}  {_outcome(report)}", style)
    stages = ", ".join(
        f"{stage.stage} {stage.outcome}" + (f" in {human_seconds(stage.seconds)}" if stage.seconds else "")
        for stage in report.stages
    )
    if stages:
        out.line(f"  {stages}")
    if report.message:
        out.line(f"  {name(report.message, 500)}")
    if report.published and report.outcome == "published":
        out.line(f"  {name(report.published)}")
    if report.partial:
        out.line(f"  published, but not all of it: {name(report.partial, 500)}", "warning")
    if report.after is not None and not report.after.ok:
        out.line(f"  what follows failed: {name(report.after.message, 500)}", "warning")
    for alert in report.alerts:
        if alert.first:
            out.line(f"  alert {_told(alert)}")


def _told(alert: AlertReport) -> str:
    sinks = [d.sink + ("" if d.ok else f" (failed: {d.error})") for d in alert.deliveries]
    return f"{problem_name(alert.problem)}: {', '.join(sinks) or 'recorded'}"


def show_pass(out: Output, report: PassReport) -> None:
    """Every step that was worked on, then what was left alone."""
    for run in report.runs:
        for step in run.steps:
            show_step(out, step)
        if run.error:
            out.line(f"{name(run.run)}  not reached: {name(run.error, 500)}", "bad")
        if run.mistake:
            out.line(f"{name(run.run)}  {name(run.mistake, 500)}", "bad")
        if run.unknown:
            out.line(f"{name(run.run)}  not steps, left alone: {_names(run.unknown)}", "dim")
        for told in run.alerts:
            if told.first:
                out.line(f"{name(run.run)}  told: {_told(told)}", "warning")
        if run.redelivered:
            out.line(f"{name(run.run)}  {plural(run.redelivered, 'alert')} delivered that had failed before")
        for failed in run.undelivered:
            out.line(f"{name(run.run)}  alert not delivered: {name(failed, 500)}", "warning")
        left = [f"{plural(run.unchanged, 'step')} with nothing left to do"] if run.unchanged else []
        left += [f"being written: {_names(run.writing)}"] if run.writing else []
        left += [f"later than a published one, left alone: {_names(run.late)}"] if run.late else []
        left += [f"processed by another worker: {_names(run.leased)}"] if run.leased else []
        if left or not (run.steps or run.error or run.mistake):
            out.line(f"{name(run.run)}  {'; '.join(left) or 'no steps'}", "dim")


def errors_of_step(report: StepReport) -> list[str]:
    """What quiet mode says of a step."""
    if report.outcome not in ("problem", "retry"):
        return []
    return [f"{report.url}: {_outcome(report)}: {report.message}"]


def errors_of_pass(report: PassReport) -> Iterator[str]:
    """What quiet mode says of a pass."""
    for run in report.runs:
        if run.error:
            yield f"{run.run}: {run.error}"
        if run.mistake:
            yield run.mistake
        for step in run.steps:
            yield from errors_of_step(step)


def _outcome(report: StepReport) -> str:
    if report.outcome == "problem":
        return problem_name(report.problem or "problem")
    if report.outcome == "retry":
        return f"failed {plural(report.attempts, 'time')}, will be tried again"
    return {"writing": "still being written", "leased": "another worker is at it"}.get(
        report.outcome, report.outcome
    )


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(name(each) for each in names[:_MOST_NAMES]) + more
