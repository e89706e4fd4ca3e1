"""What a person sees of a run's steps: how it fares, a row a step, then what is wrong and who is at work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flows.cli.output import ROOM, Cell, Output
from flows.text import human_age, human_bytes, human_seconds, name, plural, problem_name

if TYPE_CHECKING:
    from flows.condition import LeaseStatus, SavingStatus, SinkStatus
    from flows.status import RunStatus, StatusReport, StepStatus

_STATES = {
    "published": "good",
    "replaced": "dim",
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
_ALERTS = {
    "delivered": "told",
    "partly": "not delivered to all, tried",
    "failed": "not delivered, tried",
    "sending": "being told since",
}
_STAGE_COLUMNS = {"validate": "VALID", "test-load": "LOAD", "export": "EXPORT", "publish": "PUBLISH"}
_COUNTED = ["ERR", "WARN"]
_SAVING = {"healthy": "good", "stalled": "bad", "unknown": "dim"}
_HOLDING = {"alive": "info", "silent": "warning", "ended": "warning"}
_SENT = {"delivered": "good", "failed": "bad", "never": "dim"}


def show_status(out: Output, report: StatusReport, *, most: int | None = None) -> None:
    """Every run; with ``most``, no more than the newest so many steps of each and what is wrong with them."""
    for number, run in enumerate(report.runs):
        if number:
            out.line()
        _show_run(out, run, most)


def _show_run(out: Output, run: RunStatus, most: int | None) -> None:
    out.line(f"{name(run.run)}: {name(run.source)}", "title")
    if run.error:
        out.line(f"could not be read: {name(run.error, 500)}", "bad")
        return
    steps = run.steps if most is None else run.steps[-most:]
    out.facts(
        [
            ("saving", (_saving(run.saving), _SAVING[run.saving.state])),
            ("published", name(f"{run.publish.rstrip('/')}/{run.run}", 1000)),
        ]
    )
    if len(steps) < len(run.steps):
        out.line(f"… and {plural(len(run.steps) - len(steps), 'earlier step')}", "dim")
    if steps:
        _table(out, steps)
    else:
        out.line("no steps", "dim")
    troubled = [
        step for step in steps if step.message or step.alerts or step.partial or step.state == "replaced"
    ]
    if troubled:
        out.line()
    for step in troubled:
        _show_trouble(out, step)
    if run.alerts:
        out.line()
    for alert in run.alerts:
        out.line(f"{name(alert.title or alert.problem)}", "dim" if alert.over else "warning")
        over = "over by now; " if alert.over and alert.problem != "recovered" else ""
        out.line(f"  {over}{_ALERTS[alert.state]} {_minute(alert.told)}", "dim")
    _show_sinks(out, run.sinks)
    _show_leases(out, run.leases)
    if run.unknown:
        out.line()
        more = f" and {len(run.unknown) - 10:,} more" if len(run.unknown) > 10 else ""
        out.line(f"not steps, left alone: {', '.join(name(each) for each in run.unknown[:10])}{more}", "dim")


def _saving(saving: SavingStatus) -> str:
    if saving.quiet is None or saving.usual is None:
        said = "too few commits to tell"
    else:
        said = (
            f"{saving.state}: last commit {name(saving.last or '')}, {human_age(saving.quiet)} ago; "
            f"one every {human_seconds(saving.usual)} is usual"
        )
    return said + (f"; {human_bytes(saving.junk_bytes)} never committed" if saving.junk_bytes else "")


def _table(out: Output, steps: list[StepStatus]) -> None:
    if out.width >= ROOM:
        columns = ["STEP", "STATE", *_STAGE_COLUMNS.values(), "SIZE", "AGE", *_COUNTED, "PUBLISHED", "ALIAS"]
    else:
        columns = ["STEP", "STATE", "STAGES", "SIZE", "AGE", *_COUNTED, "ALIAS"]
    cells = [_cells(step) for step in steps]
    out.table(
        columns, ([row[column] for column in columns] for row in cells), right=["SIZE", "AGE", *_COUNTED]
    )


def _cells(step: StepStatus) -> dict[str, Cell]:
    state = problem_name(step.problem) if step.state == "problem" and step.problem else step.state
    return {
        "STEP": name(step.step),
        "STATE": (state, "warning" if step.partial else _STATES[step.state]),
        **{title: _STAGES[step.stages[stage]] for stage, title in _STAGE_COLUMNS.items()},  # type: ignore[index]
        "STAGES": _stages(step),
        "SIZE": human_bytes(step.bytes) if step.files else "",
        "AGE": "" if step.age is None else human_age(step.age),
        "ERR": (f"{step.errors:,}", "error") if step.errors else "",
        "WARN": (f"{step.warnings:,}", "warning") if step.warnings else "",
        # The directory below the step's: all that is not in the same row already.
        "PUBLISHED": (step.published or "").rstrip("/").rpartition("/")[2],
        "ALIAS": ", ".join(name(alias) for alias in step.aliases),
    }


def _stages(step: StepStatus) -> Cell:
    """All stages in a few characters."""
    failed = next((stage for stage, state in step.stages.items() if state == "failed"), None)
    if failed is not None:
        return f"{failed} failed", "bad"
    done = sum(state == "done" for state in step.stages.values())
    return f"{done} of {len(step.stages)}", "good" if done == len(step.stages) else "dim"


def _show_trouble(out: Output, step: StepStatus) -> None:
    facts = [f"failed {plural(step.attempts, 'time')}"] if step.state == "failing" else []
    facts += [
        f"{problem_name(alert.problem)} {_ALERTS[alert.state]} {_minute(alert.told)}" for alert in step.alerts
    ]
    said = step.message or (f"published; {step.partial}" if step.partial else step.state)
    if step.state == "replaced":
        said = f"saved over; what was saved before stays published as {step.published}"
    out.line(f"{name(step.step)}: {name(said, 500)}")
    if facts:
        out.line(f"  {'; '.join(name(fact) for fact in facts)}", "dim")


def _show_sinks(out: Output, sinks: list[SinkStatus]) -> None:
    """Where alerts go; nothing where none are configured and nothing was ever to tell."""
    if len(sinks) < 2 and all(sink.state == "never" for sink in sinks):
        return
    out.line()
    out.table(
        ["ALERTS TO", "LAST", "WHEN", "ABOUT"],
        (
            [
                name(sink.sink),
                (sink.state, _SENT[sink.state]),
                _minute(sink.when) if sink.when else "",
                " ".join(name(part) for part in (sink.step, problem_name(sink.problem or "")) if part),
            ]
            for sink in sinks
        ),
    )
    for sink in sinks:
        if sink.state == "failed" and sink.error:
            out.line(f"  {name(sink.sink)}: {name(sink.error, 300)}", "bad")


def _show_leases(out: Output, leases: list[LeaseStatus]) -> None:
    if not leases:
        return
    out.line()
    out.table(
        ["AT WORK", "WHO", "SINCE", "SIGN OF LIFE", "STATE"],
        (
            [
                name(lease.step),
                name(lease.who),
                _minute(lease.since) if lease.since else "",
                "" if lease.quiet is None else f"{human_age(lease.quiet)} ago",
                (lease.state, _HOLDING[lease.state]),
            ]
            for lease in leases
        ),
    )


def _minute(told: str) -> str:
    """``2026-01-31 12:00 UTC`` for a time in ISO 8601."""
    return f"{told[:16].replace('T', ' ')} UTC"
