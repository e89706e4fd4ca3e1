"""The command that writes a page for people to look at."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcp.errors import UsageError
from flows.cli.command import command
from flows.cli.failures import FINE
from flows.cli.options import SETTINGS_FILE, Copied
from flows.cli.output import Output
from flows.text import human_bytes, human_seconds, name

if TYPE_CHECKING:
    from flows.report.saving import SavedReport

_STATES = {
    "Safe to resume": "good",
    "Healthy": "good",
    "Being written": "info",
    "No steps": "info",
    "Nothing proven": "info",
}


@command("report")
def report(
    out: Output,
    url: Annotated[
        str | None,
        typer.Argument(metavar="[URL]", help="A checkpoint; without it, the runs in the settings."),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="What to write, a path or URL. Default: NAME-report.html."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", help="The settings file. Default: lifecycle.toml."),
    ] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="NAME", help="Show only this run.")] = None,
    scrub: Annotated[
        bool, typer.Option("--scrub", help="Read every byte: norms, NaN, damage inside records.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="URL", help="A good checkpoint whose keys are the expected ones."),
    ] = None,
    contract: Annotated[
        str | None,
        typer.Option("--contract", metavar="FILE", help="Expected keys, as ckpt contract writes them."),
    ] = None,
    copied: Copied = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Then show it to browsers on this machine, until Ctrl-C.")
    ] = False,
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="For --serve; 0: any free one.")
    ] = 0,
) -> int:
    """Write one HTML page to look at: a checkpoint, or runs with all their steps.

    Of a checkpoint: whether it can be resumed, every finding, who wrote which part of every tensor, what
    loads and exports cost; with --scrub also what the tensors hold. Of runs: which steps are safe, which is
    latest, what is wrong, what stages took. The page is one file that loads nothing. Exit code 0 also where
    something is wrong: the page says so.

    \b
    Examples:
      ckpt report gs://bucket/run/step_12000 -o step.html
      ckpt report ./step_200 --scrub --against ./step_100
      ckpt report --config lifecycle.toml --serve
    """
    if serve and output is not None and "://" in output:
        raise UsageError("--serve shows a local file; write it to one with -o")
    if url is not None:
        if config is not None or run is not None:
            raise UsageError("--config and --run are for runs; give either them or a checkpoint")
        saved = _checkpoint(out, url, output, scrub, against, contract, copied)
    else:
        if scrub or copied or against is not None or contract is not None:
            raise UsageError("--scrub, --against, --contract and --copied need the URL of a checkpoint")
        saved = _runs(out, config or SETTINGS_FILE, run, output)
    out.report(saved, lambda: show_report(out, saved))
    if serve:
        _serve(out, saved, port)
    return FINE


def show_report(out: Output, saved: SavedReport) -> None:
    """Where it is and what it says in a word."""
    out.facts(
        [
            ("subject", name(saved.subject)),
            ("verdict", (saved.verdict, _STATES.get(saved.verdict, "warning"))),
            (
                "report",
                f"{name(saved.report, 1000)} ({human_bytes(saved.bytes)}, {human_seconds(saved.seconds)})",
            ),
        ]
    )


def _checkpoint(
    out: Output,
    url: str,
    output: str | None,
    scrub: bool,
    against: str | None,
    contract: str | None,
    copied: bool,
) -> SavedReport:
    from flows.report.making import report_checkpoint

    arguments = {"scrub": scrub, "against": against, "contract": contract, "copied": copied}
    if scrub:
        with out.progress("scrub") as progress:
            return report_checkpoint(url, output, validation={**arguments, "progress": progress})
    with out.waiting(f"looking at {url}"):
        return report_checkpoint(url, output, validation=arguments)


def _runs(out: Output, config: Path, run: str | None, output: str | None) -> SavedReport:
    from flows.report.making import report_runs
    from flows.settings import load_settings

    settings = load_settings(config)
    with out.waiting("looking at the runs"):
        return report_runs(settings, run, output)


def _serve(out: Output, saved: SavedReport, port: int) -> None:
    from flows.report.making import pages_for
    from flows.report.serving import served

    with served(pages_for(Path(saved.report)), port) as at:
        out.flush()
        out.note(f"{at}  (Ctrl-C ends it)")
        while True:
            time.sleep(3600)
