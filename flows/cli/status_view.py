"""What a person sees of a run's steps: one row each, then what is wrong with those that are not fine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flows.cli.lifecycle_views import problem_name
from flows.cli.output import Cell, Output
from flows.cli.text import human_age, human_bytes, name, plural

if TYPE_CHECKING:
    from flows.status import RunStatus, StatusReport, StepStatus

_STATES = {
    "published": "good",
    "problem": "bad",
    "failing": "warning",
    "writing": "info",
    "in-progress": "info",
    "waiting": "info",
    "late": "dim",
    "deleting": "dim",
    "retired": "dim",
    "gone": "dim",
}
_STAGES: dict[str, Cell] = {"done": ("ok", "good"), "failed": ("failed", "bad"), "open": ("-", "dim")}
_ALERTS = {"delivered": "told", "failed": "not delivered, tried", "sending": "being told since"}
_STAGE_COLUMNS = {"validate": "VALID", "test-load": "LOAD", "export": "EXPORT", "publish": "PUBLISH"}


def show_status(out: Output, report: StatusReport) -> None:
    """Every run."""
    for number, run in enumerate(report.runs):
        if number:
            out.line()
        _show_run(out, run)


def _show_run(out: Output, run: RunStatus) -> None:
    out.line(f"{name(run.run)}: {name(run.source)}", "title")
    if run.error:
        out.line(f"could not be read: {name(run.error, 500)}", "bad")
        return
    out.table(
        ["STEP", "STATE", *_STAGE_COLUMNS.values(), "SIZE", "AGE", "ALIAS"],
        (_row(step) for step in run.steps),
        right=["SIZE", "AGE"],
    )
    troubled = [step for step in run.steps if step.message or step.alerts]
    if troubled:
        out.line()
    for step in troubled:
        _show_trouble(out, step)
    if run.alerts:
        out.line()
    for alert in run.alerts:
        out.line(f"{name(alert.title or alert.problem)}", "warning")
        out.line(f"  {_ALERTS[alert.state]} {_minute(alert.told)}", "dim")
    if run.unknown:
        out.line()
        out.line(f"not steps, left alone: {', '.join(name(each) for each in run.unknown[:10])}", "dim")


def _row(step: StepStatus) -> list[Cell]:
    state = problem_name(step.problem) if step.state == "problem" and step.problem else step.state
    return [
        name(step.step),
        (state, _STATES[step.state]),
        *(_STAGES[step.stages[stage]] for stage in _STAGE_COLUMNS),  # type: ignore[index]
        human_bytes(step.bytes) if step.files else "",
        "" if step.age is None else human_age(step.age),
        ", ".join(step.aliases),
    ]


def _show_trouble(out: Output, step: StepStatus) -> None:
    facts = [f"failed {plural(step.attempts, 'time')}"] if step.state == "failing" else []
    facts += [
        f"{problem_name(alert.problem)} {_ALERTS[alert.state]} {_minute(alert.told)}" for alert in step.alerts
    ]
    out.line(f"{name(step.step)}: {name(step.message or step.state, 500)}")
    if facts:
        out.line(f"  {'; '.join(name(fact) for fact in facts)}", "dim")


def _minute(told: str) -> str:
    """``2026-01-31 12:00 UTC`` for a time in ISO 8601."""
    return f"{told[:16].replace('T', ' ')} UTC"
