"""The command that shows everything else on this machine alone."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.command import command
from flows.cli.failures import ENVIRONMENT, FINE
from flows.cli.output import Output
from flows.cli.prefect_environment import isolate_prefect, prepare_prefect
from flows.text import human_seconds, name

if TYPE_CHECKING:
    from flows.demo.demo import DemoReport


@command("demo")
def demo(
    out: Output,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to make it: a new or empty directory.")
    ] = Path("ckpt-demo"),
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Then show report and Prefect's UI to browsers here, until Ctrl-C."),
    ] = False,
) -> int:
    """See all of it happen on this machine.

    Two ranks really train and save several steps, good and broken ones, into a local bucket. Then the watch
    flow validates, test-loads, exports and publishes the good ones and tells of the others, on a Prefect
    server of its own that ends with the command. A second call does nothing again. The report that it names
    at the end is one HTML page to look at.

    \b
    Examples:
      ckpt demo
      ckpt demo ./my-demo --serve
    """
    from dcp.storage import home_expanded

    here = Path.cwd()
    isolate_prefect(str(home_expanded(directory).absolute() / ".prefect"))
    prepare_prefect(out.debug)
    from flows.demo.demo import run_demo

    report = run_demo(directory, out.note)
    out.report(report, lambda: show_demo(out, report, here))
    if serve:
        _serve(out, Path(report.report))
    return FINE if all(run.ok for run in report.watched.runs) else ENVIRONMENT


def _serve(out: Output, page: Path) -> None:
    """Show the report and Prefect's UI until somebody has had enough."""
    from flows.prefect_server import shown_ui
    from flows.report.making import pages_for
    from flows.report.serving import served

    out.flush()
    out.note("")
    with served(pages_for(page)) as at:
        out.note(f"report        {at}")
        with shown_ui() as prefect:
            out.note(f"Prefect's UI  {prefect}")
            out.note("Ctrl-C ends both")
            while True:
                time.sleep(3600)


def show_demo(out: Output, report: DemoReport, here: Path) -> None:
    """What became of the steps, where everything is, what to type next."""
    from flows.cli.status_view import show_status

    if not report.trained and not report.watched.steps:
        out.line("Nothing to do: every good step is published, and of every bad one people were told.")
    elif not report.again.steps:
        out.line("A second pass found nothing left to do.")
    out.line()
    show_status(out, report.status)

    def shown(place: str) -> str:
        relative = os.path.relpath(place, here)
        return name(place if relative.startswith("..") else relative)

    def typed(place: str) -> str:
        return shlex.quote(shown(place))

    [run] = report.status.runs
    latest = next((step.published for step in run.steps if "latest" in step.aliases), None)
    out.line()
    out.facts(
        [
            ("training bucket", shown(report.source)),
            ("published", shown(report.published)),
            ("latest, for torch.load", shown(f"{latest}/checkpoint.pt") if latest else "none"),
            ("ledger and alerts", shown(report.ledger)),
            ("settings", shown(report.settings)),
            ("report, for a browser", shown(report.report)),
            ("took", human_seconds(report.seconds)),
        ]
    )
    out.line()
    out.line("Next")
    ckpt = program(here)
    broken = next((step.step for step in run.steps if step.problem), None)
    if broken:
        out.line(f"  {ckpt} validate {typed(f'{report.source}/{broken}')}")
    if latest:
        out.line(f"  {ckpt} verify {typed(latest)}")
    out.line(f"  {ckpt} status --config {typed(report.settings)}")


def program(here: Path) -> str:
    """What to type in ``here`` for this very command: its name alone only where the shell would find it.

    The process works in another directory by now.
    """
    called = Path(here, sys.argv[0])
    if called.name != "ckpt" or not called.is_file():
        called = Path(sys.executable).with_name("ckpt")
    known = shutil.which("ckpt")
    if not called.is_file() or (known is not None and Path(here, known).absolute() == called.absolute()):
        return "ckpt"
    relative = os.path.relpath(called, here)
    if relative.startswith(".."):
        return shlex.quote(str(called))
    return shlex.quote(relative if os.sep in relative else f".{os.sep}{relative}")
