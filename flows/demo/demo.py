"""`run_demo`: train, break, watch; or see that all of this has been done.

Training takes a while and so does the start of Prefect's own server, so both happen at once. Whatever an
interrupted demo left is completed by the next one: training is started over, a pass goes on where it ended.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from dcp.findings import Report
from dcp.storage import home_expanded
from flows.demo.damage import interrupt_save, truncate_data
from flows.demo.place import BrokenStep, Mark, Place, SavedStep
from flows.demo.training import RENAMED_STEP, Training
from flows.passes import PassReport, watch_once
from flows.prefect_server import InBackground, connect
from flows.report.making import report_runs
from flows.settings import load_settings
from flows.status import StatusReport, run_status

TRUNCATED_STEP = 30
INTERRUPTED_STEP = 60

_BEYOND_GRACE = 600.0
"""Seconds by which the interrupted save is older than the grace period."""

Note = Callable[[str], None]
"""Told what is going on, a line at a time."""


class DemoReport(Report):
    """What a demo did. Places are absolute paths; ``seconds`` is how long this call took."""

    directory: str
    settings: str
    source: str
    published: str
    ledger: str
    report: str
    """The page of the run, which leads to those of its published steps."""
    trained: bool
    """Whether training was done by this call."""
    saved: list[SavedStep]
    broken: list[BrokenStep]
    watched: PassReport
    again: PassReport
    """A second pass, which should find nothing to do."""
    status: StatusReport
    seconds: float


def run_demo(directory: Path, note: Note) -> DemoReport:
    """Make ``directory`` a demo, or complete it.

    Changes the working directory of the process: Prefect would read settings of the user's from it.

    Raises:
        UsageError: the directory holds something else, or another demo is at work in it.
        EnvironmentFault: training or storage failed.
    """
    started = time.monotonic()
    place = Place(home_expanded(directory).absolute())
    mark = place.prepare()
    with place.alone() as lock:
        trained = not mark.trained
        if trained:
            mark = _train(place, lock, note)
            place.keep(mark)
        else:
            note("Training was done by an earlier demo")
        _work_in(place.root)
        settings = load_settings(place.settings)
        note("Watching the bucket: validate, test-load on 2 and on 3 ranks, export, publish")
        watched = watch_once(settings)
        again = watch_once(settings)
        [run] = settings.runs
        return DemoReport(
            directory=str(place.root),
            settings=str(place.settings),
            source=run.source,
            published=str(place.published / run.name),
            ledger=str(place.published / run.name / ".ledger"),
            report=report_runs(settings, None, str(place.report)).report,
            trained=trained,
            saved=mark.saved,
            broken=mark.broken,
            watched=watched,
            again=again,
            status=run_status(settings),
            seconds=round(time.monotonic() - started, 3),
        )


def _train(place: Place, lock: int, note: Note) -> Mark:
    if place.clear_run():
        note("An earlier demo was interrupted while it trained; starting over")
    note("Training on 2 ranks (FSDP2, AdamW, gloo) while Prefect's own server starts")
    [run] = load_settings(place.settings).runs
    with Training(place.run, place.training_log, lock) as training:
        _work_in(place.root)
        server = InBackground(_prepare_flows)
        saved = training.wait()
        for step in saved:
            note(f"  step_{step.step} saved, loss {step.loss:.2f}")
        server.finish()
    broken = [
        truncate_data(place.run / f"step_{TRUNCATED_STEP}", TRUNCATED_STEP),
        BrokenStep(step=RENAMED_STEP, what="saved after the model was wrapped, so its keys have other names"),
        interrupt_save(
            place.run / f"step_{INTERRUPTED_STEP}", INTERRUPTED_STEP, run.grace_period + _BEYOND_GRACE
        ),
    ]
    note("Broken on purpose")
    for one in broken:
        note(f"  step_{one.step}: {one.what}")
    return Mark(trained=True, saved=saved, broken=broken)


def _work_in(directory: Path) -> None:
    """Change the working directory; what is imported later still comes from where it came from."""
    sys.path[:] = [str(Path(entry or ".").absolute()) for entry in sys.path]
    os.chdir(directory)


def _prepare_flows() -> None:
    """Start Prefect's server, and load what flows need while it comes up."""
    connect()
    for module in ("flows.watch", "dcp.load"):
        import_module(module)
