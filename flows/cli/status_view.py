"""What a person sees of a run's steps: one row each, then what is wrong with those that are not fine."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    "retired": "dim",
    "gone": "dim",
}
_STAGES: dict[str, Cell] = {"done": ("ok", "good"), "failed": ("failed", "bad"), "open": ("-", "dim")}
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
    if run.unknown:
        out.line()
        out.line(f"not steps, left alone: {', '.join(name(each) for each in run.unknown[:10])}", "dim")


def _row(step: StepStatus) -> list[Cell]:
    state = step.problem if step.state == "problem" and step.problem else step.state
    return [
        name(step.step),
        (state, _STATES[step.state]),
        *(_STAGES[step.stages[stage]] for stage in _STAGE_COLUMNS),  # type: ignore[index]
        human_bytes(step.bytes) if step.files else "",
        "" if step.age is None else human_age(step.age),
        ", ".join(step.aliases),
    ]


def _show_trouble(out: Output, step: StepStatus) -> None:
    told = [f"told {alert.told}" if alert.state == "delivered" else alert.state for alert in step.alerts]
    attempts = f", {plural(step.attempts, 'attempt')}" if step.state == "failing" else ""
    alerts = f" (alert {', '.join(told)}{attempts})" if told else attempts
    out.line(f"{name(step.step)}: {name(step.message, 500) if step.message else step.state}{alerts}")
