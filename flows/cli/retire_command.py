"""`ckpt retire`: retention, as a dry run unless it is told to be carried out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.command import command
from flows.cli.failures import ENVIRONMENT, FINE
from flows.cli.options import SETTINGS_FILE, Config
from flows.cli.output import Cell, Output
from flows.text import human_bytes, name, plural

if TYPE_CHECKING:
    from flows.retiring import RetireReport, RunRetirement
    from tasks.retire import Decision

_STYLES = {"keep": "good", "trash": "warning", "delete": "bad"}


@command("retire")
def retire(
    out: Output,
    run: Annotated[str | None, typer.Option("--run", metavar="NAME", help="Only this run.")] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Carry it out; otherwise nothing is written.")
    ] = False,
    config: Config = SETTINGS_FILE,
) -> int:
    """Say which steps of a training bucket are kept, and delete the others in two phases.

    What is kept is said in the table [runs.retire] of the settings. Without --apply this is a dry run. With
    it, steps that nothing keeps go into the trash, which moves nothing, and those whose time there is over
    are deleted where the settings say delete = true. What is not validated and published, or is led to by an
    alias, or is being processed, is never touched, and the newest good step is always kept. Exit code 3
    where something could not be carried out.

    \b
    Examples:
      ckpt retire
      ckpt retire --run my-run --apply
    """
    from flows.retiring import retire_runs
    from flows.settings import load_settings

    settings = load_settings(config)
    with out.waiting("retiring"):
        report = retire_runs(settings, run, apply=apply)
    out.report(report, lambda: _show(out, report), errors=_errors(report))
    for one in report.runs:
        for warning in one.warnings:
            out.warn(f"{one.run}: {warning}")
    return FINE if report.ok else ENVIRONMENT


def _show(out: Output, report: RetireReport) -> None:
    for number, run in enumerate(report.runs):
        if number:
            out.line()
        _show_run(out, run, report.applied)
    if not report.applied:
        out.line()
        out.line("a dry run: nothing was written; carry it out with ckpt retire --apply", "dim")


def _show_run(out: Output, run: RunRetirement, applied: bool) -> None:
    out.line(f"{name(run.run)}: {name(run.source)}", "title")
    if run.error:
        out.line(f"could not be read: {name(run.error, 500)}", "bad")
        return
    out.table(
        ["STEP", "ACTION", "SIZE", "WHY"], (_row(each, applied) for each in run.decisions), right=["SIZE"]
    )
    gone = [each for each in run.decisions if each.action != "keep"]
    freed = f"; {human_bytes(run.freed)} deleted" if applied else ""
    out.line(
        f"{plural(len(gone), 'step')} of {human_bytes(sum(each.bytes for each in gone))} not kept{freed}",
        "dim",
    )


def _row(decision: Decision, applied: bool) -> list[Cell]:
    action: str = decision.action
    if applied and action == "delete":
        action = "deleted" if decision.done else "not deleted"
    why = decision.failed or decision.why
    return [
        name(decision.step),
        (action, _STYLES[decision.action]),
        human_bytes(decision.bytes) if decision.files else "",
        name(why, 200),
    ]


def _errors(report: RetireReport) -> list[str]:
    errors = [f"{run.run}: {run.error}" for run in report.runs if run.error]
    errors += [
        f"{run.run}: {each.step}: {each.failed}"
        for run in report.runs
        for each in run.decisions
        if each.failed
    ]
    return errors
