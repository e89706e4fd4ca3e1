"""One pass over all runs: list, decide what is due, do it.

`flows.survey` decides from two listings. `run_pass` then hands each due step to a processor, and one run
that cannot be reached stops no other. `watch_once` is what people call: Prefect is only started where
something is due.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from pydantic import Field

from dcp.errors import EnvironmentFault, SettingsError, StorageError, UsageError
from dcp.findings import Report
from flows.reaching import due_outage, due_unnoted, tell_outage, tell_return, tell_unnoted
from flows.run_telling import tell_run
from flows.settings import LifecycleSettings, RunSettings
from flows.survey import RunSurvey, open_run_problems, survey_run
from flows.unnoted import Unnoted
from flows.workshop import StageSettingsError, StepGoneError, StepReport
from tasks.alert import AlertReport, Emit, redeliver
from tasks.discover import describe, provisional_key
from tasks.ledger import timestamp
from tasks.text import plain

_log = logging.getLogger(__name__)


class RunReport(Report):
    """What one pass did for a run. ``steps`` lists those that were worked on."""

    run: str
    ok: bool
    """Whether source and ledger could be reached and neither environment nor settings failed a stage."""
    error: str | None = None
    mistake: str | None = None
    """A setting with which a step could not be processed; the step was left alone."""
    steps: list[StepReport] = Field(default_factory=list)
    unchanged: int = 0
    """Steps on which there is nothing left to do."""
    writing: list[str] = Field(default_factory=list)
    """Steps that are being written."""
    leased: list[str] = Field(default_factory=list)
    """Steps that another worker is processing."""
    late: list[str] = Field(default_factory=list)
    """Steps that came after a later one was published and that the settings leave alone."""
    unknown: list[str] = Field(default_factory=list)
    """Directories that are no steps, reported by this pass and not again."""
    alerts: list[AlertReport] = Field(default_factory=list)
    """What was told of the run itself."""
    redelivered: int = 0
    """Alerts of earlier passes that have reached everybody now."""
    undelivered: tuple[str, ...] = ()
    """Deliveries that were tried again and failed again: alert, sink and reason."""

    def take_in(self, found: RunSurvey) -> None:
        """Say of the steps what the survey alone tells."""
        self.unchanged = found.unchanged
        self.leased = list(found.leased)
        self.late = list(found.late)
        self.writing = [step.name for step in found.discovery.steps if step.progress == "writing"]


class PassReport(Report):
    """What one pass did. ``started`` is UTC in ISO 8601."""

    started: str
    seconds: float
    runs: list[RunReport]

    @property
    def steps(self) -> list[StepReport]:
        """All steps that were worked on."""
        return [step for run in self.runs for step in run.steps]

    @property
    def exit_code(self) -> int:
        """2 if the settings are wrong, 3 if the environment failed, 1 if a step was found bad, else 0."""
        if any(run.mistake for run in self.runs):
            return 2
        if not all(run.ok for run in self.runs):
            return 3
        return 1 if any(step.outcome == "problem" for step in self.steps) else 0


Processor = Callable[[RunSettings, str], StepReport]
"""Takes a step (by run and name) as far as it will go."""


def run_pass(settings: LifecycleSettings, process: Processor, *, emit: Emit | None = None) -> PassReport:
    """Survey every run and do what is due.

    Whatever is wrong with one run, its settings too, stands in its report, and the others are seen to.

    Args:
        settings: all runs.
        process: takes one step as far as it will go.
        emit: emits Prefect events of alerts that are sent again.
    """
    started = time.time()
    reports = [_run_report(settings, run, process, emit) for run in settings.runs]
    return PassReport(started=timestamp(started), seconds=round(time.time() - started, 3), runs=reports)


def _run_report(
    settings: LifecycleSettings, run: RunSettings, process: Processor, emit: Emit | None
) -> RunReport:
    report = RunReport(run=run.name, ok=True)
    try:
        found = _surveyed(settings, run, report, emit)
        report.take_in(found)
        _note(found, report)
        report.alerts += tell_run(settings, found, found.recovered, emit)
        _send_again(found, settings.alert_urls(run), emit, report)
        _process_due(found, run, process, report)
        if found.due and report.ok and not report.leased:
            fitting = open_run_problems(found.snapshot).get("settings")
            report.alerts += tell_run(settings, found, (fitting,) if fitting else (), emit, new=False)
        report.alerts += tell_return(settings, run, emit)
    except SettingsError as error:
        report.ok = False
        report.mistake = str(error)
    except (EnvironmentFault, UsageError) as error:
        report.ok = False
        report.error = str(error)
        if isinstance(error, StorageError):
            report.alerts += tell_unnoted(settings, run, error, emit)
    # Whatever is wrong with one run, the others are seen to.
    except Exception as error:
        _log.exception("run %s", run.name)
        report.ok = False
        report.error = plain(f"internal error: {type(error).__name__}: {error}")
    return report


def _survey(settings: LifecycleSettings, run: RunSettings) -> RunSurvey:
    return survey_run(run, resend_after=settings.resend_after, lease_expiry=settings.lease_expiry)


def _surveyed(
    settings: LifecycleSettings, run: RunSettings, report: RunReport, emit: Emit | None
) -> RunSurvey:
    """The run's survey. Raises `StorageError` where storage fails, of which people are told if it lasts."""
    try:
        return _survey(settings, run)
    except StorageError as error:
        outage = due_outage(settings, run)
        if outage is not None:
            report.alerts.append(tell_outage(settings, run, outage, error, emit))
        raise


def _send_again(found: RunSurvey, sinks: Sequence[str], emit: Emit | None, report: RunReport) -> None:
    """Attempt the deliveries that are due."""
    for key, pending in found.deliver:
        sent = redeliver(found.ledger, key, pending, sinks=sinks, emit=emit)
        if sent is not None:
            report.redelivered += sent.ok
            report.undelivered += tuple(
                f"{sent.problem} of {key.step} to {delivery.sink}: {delivery.error}"
                for delivery in sent.deliveries
                if not delivery.ok
            )


def _process_due(found: RunSurvey, run: RunSettings, process: Processor, report: RunReport) -> None:
    """Process one due step after the other, until storage does not answer."""
    for name in found.due:
        try:
            step = process(run, name)
        except StepGoneError:
            # Removed since the listing; if the source itself is gone the next pass says so.
            continue
        except StageSettingsError as mistaken:
            report.ok = False
            report.mistake = report.mistake or str(mistaken)
            continue
        if step.outcome == "leased":
            report.leased.append(name)
            continue
        report.steps.append(step)
        report.ok = report.ok and step.outcome != "retry" and (step.after is None or step.after.ok)
        if step.unreachable:
            report.error = f"storage did not answer while {name} was processed: {step.message}"
            break


def _note(found: RunSurvey, report: RunReport) -> None:
    """Write down what later passes must know: unknown names, and steps whose times tell nothing."""
    for step in found.note:
        found.ledger.create(provisional_key(step.name, step.survey), "seen", describe(step))
    if found.unknown and found.ledger.report_unknown(found.unknown):
        report.unknown = list(found.unknown)


def watch_once(settings: LifecycleSettings) -> PassReport:
    """One pass. Where nothing is due it ends after the listings; otherwise it runs as a Prefect flow.

    Raises:
        EnvironmentFault: Prefect does not work.
    """
    started = time.time()
    idle: list[RunReport] = []
    for run in settings.runs:
        report = RunReport(run=run.name, ok=True)
        idle.append(report)
        try:
            found = _survey(settings, run)
        except StorageError as error:
            if due_outage(settings, run) is not None or due_unnoted(settings, run, error) is not None:
                return _in_flow(settings)
            report.ok = False
            report.error = str(error)
            continue
        # A fault of ours: the pass tells of it, and sees to the other runs.
        except Exception:
            return _in_flow(settings)
        if not found.idle or Unnoted(run).told:
            return _in_flow(settings)
        Unnoted(run).over()
        report.take_in(found)
    return PassReport(started=timestamp(started), seconds=round(time.time() - started, 3), runs=idle)


def _in_flow(settings: LifecycleSettings) -> PassReport:
    # Importing Prefect takes longer than a pass in which nothing is due.
    from flows.watch import watch_in_flow

    return watch_in_flow(settings)
