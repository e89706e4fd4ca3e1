"""Commands that take steps through their life, as `lifecycle.toml` says."""

from __future__ import annotations

import signal
import sys
import time
import traceback
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from dcp.errors import UsageError
from flows.cli.command import command
from flows.cli.failures import ENVIRONMENT, FAULTY, FINE, failure_of
from flows.cli.options import SETTINGS_FILE, Config
from flows.cli.output import Output, OutputClosedError
from flows.cli.prefect_environment import prepare_prefect

if TYPE_CHECKING:
    from flows.passes import PassReport
    from flows.settings import LifecycleSettings

_LOOK = 10.0
"""Seconds between two looks of a watch, where nothing is said."""
_FEWEST_ROWS = 3
_OTHER_LINES = 14
"""Lines of a terminal that are not for rows of steps."""
_OUTCOMES = {
    "published": FINE,
    "problem": FAULTY,
    "writing": FAULTY,
    "retry": ENVIRONMENT,
    "leased": ENVIRONMENT,
}


@command("run")
def run(
    out: Output,
    url: Annotated[str, typer.Argument(metavar="URL", help="A step of one of the runs in the settings.")],
    accept_keys: Annotated[
        bool,
        typer.Option("--accept-keys", help="Its keys are meant: expect them of it and of all later steps."),
    ] = False,
    config: Config = SETTINGS_FILE,
) -> int:
    """Take one step from validation to publication.

    It is validated, test-loaded, exported and published, as the settings say for its run. What is done
    already is not done again; what failed before is tried again. With --accept-keys a step whose keys are not
    those of the step before is taken as it is, and later steps are held against it. Exit code 0: published.
    1: the step was found bad, or is still being written. 3: the environment failed, or another worker is
    processing it.

    \b
    Example:
      ckpt run gs://bucket/run/step_12000 --config lifecycle.toml
      ckpt run gs://bucket/run/step_12000 --accept-keys
    """
    from flows.settings import load_settings

    settings = load_settings(config)
    settings.run_of(url)  # before Prefect takes its time
    prepare_prefect(out.debug)
    from flows.cli.lifecycle_views import errors_of_step, show_step
    from flows.process import run_step
    from tasks.progress import heard_by

    with out.stages(f"processing {url}") as told, heard_by(told):
        report = run_step(settings, url, accept_keys=accept_keys)
    out.report(report, lambda: show_step(out, report), errors=errors_of_step(report))
    return _OUTCOMES[report.outcome]


@command("watch")
def watch(
    out: Output,
    once: Annotated[bool, typer.Option("--once", help="Make one pass and end.")] = False,
    config: Config = SETTINGS_FILE,
) -> int:
    """Take all new steps from validation to publication.

    With --once the exit code is 0 where every step worked on is published, 1 where one was found bad in this
    pass, 2 where a setting does not fit a step, 3 where the environment failed. Without, it runs until it is
    stopped, a pass every `interval`, also where one fails, and each reads the settings anew; --json prints
    one document a pass, each on a line.

    \b
    Examples:
      ckpt watch --once --json
      ckpt watch --config gpu-cluster.toml
    """
    from flows.settings import load_settings

    settings = load_settings(config)
    prepare_prefect(out.debug)
    if once:
        report = _one_pass(out, settings)
        return report.exit_code
    signal.signal(signal.SIGTERM, _stop)
    while True:
        started = time.monotonic()
        try:
            settings = load_settings(config)
            _one_pass(out, settings, lines=True)
        except OutputClosedError:
            raise
        # Such as a Prefect that is away, or settings while they are being edited: a watcher is there for
        # longer than that lasts.
        except Exception as fault:
            if out.debug:
                traceback.print_exc()
            out.failure(replace(failure_of(fault), advice="The next pass tries it again."), one_line=True)
        out.flush()
        time.sleep(max(0.0, settings.interval - (time.monotonic() - started)))


@command("status")
def status(
    out: Output,
    run: Annotated[str | None, typer.Option("--run", metavar="NAME", help="Show only this run.")] = None,
    watching: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it anew in the same place, until Ctrl-C.")
    ] = False,
    every: Annotated[
        float | None,
        typer.Option("--every", metavar="SECONDS", min=0.1, help="For --watch: between two looks (10)."),
    ] = None,
    config: Config = SETTINGS_FILE,
) -> int:
    """Show how far each step is, whether the run still saves, and whether alerts arrive.

    Reads the ledger and lists the source; writes nothing. Exit code 0 also where steps are bad, 3 where a run
    could not be read. --watch needs a terminal; with --json it prints one document a look, each on a line.

    \b
    Examples:
      ckpt status --run my-run
      ckpt status --watch --every 30
      ckpt status --json
    """
    from flows.cli.status_view import show_status
    from flows.settings import load_settings
    from flows.status import run_status

    if every is not None and not watching:
        raise UsageError("--every is for --watch: ckpt status --watch --every SECONDS")
    if watching:
        if out.quiet or not (out.json or out.on_terminal):
            raise UsageError("--watch is for a terminal; leave it out, or give --json for a document a look")
        return _watch_status(out, load_settings(config), run, every or _LOOK)
    report = run_status(load_settings(config), run)
    errors = [f"{each.run}: {each.error}" for each in report.runs if each.error]
    out.report(report, lambda: show_status(out, report), errors=errors)
    return FINE if report.ok else ENVIRONMENT


def _watch_status(out: Output, settings: LifecycleSettings, run: str | None, every: float) -> int:
    """Show the status again and again until Ctrl-C, which is the ordinary end."""
    from flows.cli.status_view import show_status
    from flows.status import StatusReport, run_status

    def view(report: StatusReport) -> None:
        out.line(f"{report.when}  every {every:g} s, Ctrl-C ends it", "dim")
        show_status(out, report, most=max(_FEWEST_ROWS, (out.height - _OTHER_LINES) // len(report.runs)))

    signal.signal(signal.SIGTERM, _stop)
    try:
        with nullcontext() if out.json else out.live() as show:
            while True:
                report = run_status(settings, run)
                if show is None:
                    out.document(report.model_dump(), one_line=True)
                    out.flush()
                else:
                    show(partial(view, report))
                time.sleep(every)
    except KeyboardInterrupt:
        return FINE


def _one_pass(out: Output, settings: LifecycleSettings, *, lines: bool = False) -> PassReport:
    from flows.cli.lifecycle_views import errors_of_pass, show_pass
    from flows.passes import watch_once
    from tasks.progress import heard_by

    with out.stages("watching") as told, heard_by(told):
        report = watch_once(settings)
    if out.json and lines:
        out.document(report.model_dump(), one_line=True)
    else:
        out.report(report, lambda: show_pass(out, report), errors=errors_of_pass(report))
    return report


def _stop(number: int, _: FrameType | None) -> None:
    """End as on any other way out, so that a temporary Prefect server ends too."""
    sys.exit(128 + number)
