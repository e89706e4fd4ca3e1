"""One pass over all runs: list, decide what is due, do it.

`survey_run` costs two listings and one small read however many steps are finished; `due_steps` decides from
that alone. `run_pass` then hands each due step to a processor, and one run that cannot be reached stops no
other. `watch_once` is what people call: Prefect is only started where something is due.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from pydantic import Field

from dcp.errors import EnvironmentFault, StorageError
from dcp.findings import Report
from dcp.storage import open_store
from flows.lifecycle import process_step, provisional_key
from flows.settings import LifecycleSettings, RunSettings
from flows.workshop import StageSettingsError, StepGoneError, StepReport, Workshop
from tasks.alert import Emit, Pending, pending_deliveries, redeliver, told
from tasks.discover import Discovery, FoundStep, describe, discover
from tasks.leases import EXPIRY, Leases
from tasks.ledger import Ledger, StepKey, failures, timestamp
from tasks.snapshot import Snapshot, take_snapshot

Need = Literal["nothing", "wait", "note", "process"]
"""What a step needs now. ``note``: it is being written and only our own clock can tell for how long."""


class RunReport(Report):
    """What one pass did for a run. ``steps`` lists those that were worked on."""

    run: str
    ok: bool
    """Whether source and ledger could be reached and neither environment nor settings failed a stage."""
    error: str | None = None
    mistake: str | None = None
    """A setting with which a step could not be processed; the step was left alone."""
    steps: list[StepReport]
    unchanged: int = 0
    """Steps on which there is nothing left to do."""
    writing: list[str]
    """Steps that are being written."""
    leased: list[str] = Field(default_factory=list)
    """Steps that another worker is processing."""
    unknown: list[str]
    """Directories that are no steps, reported by this pass and not again."""
    redelivered: int = 0
    """Alerts of earlier passes that have reached everybody now."""
    undelivered: tuple[str, ...] = ()
    """Deliveries that were tried again and failed again: alert, sink and reason."""


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


@dataclass(frozen=True)
class RunSurvey:
    """A run as source and ledger show it, and what is due."""

    run: RunSettings
    ledger: Ledger
    discovery: Discovery
    snapshot: Snapshot
    due: tuple[str, ...] = ()
    """Names of steps to process, in the run's order."""
    leased: tuple[str, ...] = ()
    """Names of steps that a living worker is processing."""
    note: tuple[FoundStep, ...] = ()
    deliver: tuple[tuple[StepKey, Pending], ...] = ()
    unchanged: int = 0

    @property
    def unknown(self) -> tuple[str, ...]:
        """Directories that are no steps and were never reported."""
        return tuple(name for name in self.discovery.unknown if name not in self.snapshot.unknown)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to write and nothing to send."""
        return not (self.due or self.note or self.deliver or self.unknown)


def survey_run(
    run: RunSettings,
    *,
    resend_after: float,
    lease_expiry: float = EXPIRY,
    now: float | None = None,
    remember: bool = True,
) -> RunSurvey:
    """List a run's source and ledger and decide what is due.

    Args:
        run: the run.
        resend_after, lease_expiry: as in the settings, in seconds.
        now: seconds since the epoch.
        remember: keep summaries of what had to be read from the ledger, and clear away what dead workers
            left; False for callers that may only read.

    Raises:
        StorageError: source or ledger could not be listed.
    """
    at = time.time() if now is None else now
    ledger = Ledger.open(run.publish, run.name, **run.publish_options)
    snapshot = take_snapshot(ledger, remember=remember)
    discovery = discover(
        open_store(run.source, **run.options),
        patterns=run.step_pattern,
        parts=run.parts,
        grace_seconds=run.grace_period,
        now=at,
        sightings=snapshot.sightings,
    )
    due: list[str] = []
    note: list[FoundStep] = []
    unchanged = 0
    for step in discovery.steps:
        need = need_of(step, snapshot, run.max_attempts)
        if need == "process":
            due.append(step.name)
        elif need == "note":
            note.append(step)
        unchanged += need == "nothing"
    if run.order == "newest-first":
        due.reverse()
    leased = [name for name in due if name in snapshot.leases]
    if remember:
        leased = _alive(Leases(ledger.store, lease_expiry), snapshot, due)
    deliver = [
        (key, pending)
        for key, stages in snapshot.stages.items()
        if "alerted" in stages
        for pending in pending_deliveries(frozenset(stages), partial(snapshot.summary, key), at, resend_after)
    ]
    return RunSurvey(
        run=run,
        ledger=ledger,
        discovery=discovery,
        snapshot=snapshot,
        due=tuple(name for name in due if name not in leased),
        leased=tuple(leased),
        note=tuple(note),
        deliver=tuple(deliver),
        unchanged=unchanged,
    )


def _alive(leases: Leases, snapshot: Snapshot, due: Sequence[str]) -> list[str]:
    """Those of the due steps that a living worker holds; what dead ones left of other steps is removed."""
    held = []
    for name, standing in snapshot.leases.items():
        if name in due:
            held += [] if leases.dead(standing) else [name]
        else:
            leases.sweep(standing)
    return held


def key_of(step: FoundStep, snapshot: Snapshot) -> StepKey | None:
    """Under which key the ledger knows a step as it is now."""
    keys = snapshot.by_step.get(step.name, ())
    if not keys:
        return None
    listing = step.survey.listing_identity
    if len(keys) == 1 and snapshot.summary(keys[0], "seen").get("listing") == listing:
        return keys[0]
    provisional = provisional_key(step.name, step.survey)
    known = snapshot.key_of(step.name, listing, provisional)
    return known or (provisional if provisional in snapshot.stages else None)


def need_of(step: FoundStep, snapshot: Snapshot, max_attempts: int) -> Need:
    """What a step needs, from its listing and the ledger's names and summaries."""
    key = key_of(step, snapshot)
    if step.progress == "writing":
        return "note" if step.quiet is None and key is None else "wait"
    if key is None:
        return "process"
    stages = snapshot.of(key)
    if "published" in stages or "retired" in stages:
        return "nothing"
    failure = snapshot.last_failure(key)
    if failure is None:
        return "process"
    settled = failure.get("final") or len(failures(stages)) >= max_attempts
    first = snapshot.summary(key, "alerted").get("problem")
    return "nothing" if settled and told(stages, first, str(failure.get("problem"))) else "process"


def run_pass(settings: LifecycleSettings, process: Processor, *, emit: Emit | None = None) -> PassReport:
    """Survey every run and do what is due.

    Args:
        settings: all runs.
        process: takes one step as far as it will go.
        emit: emits Prefect events of alerts that are sent again.

    Raises:
        SettingsError: the settings turned out to be wrong.
    """
    started = time.time()
    reports = [_run_report(settings, run, process, emit) for run in settings.runs]
    return PassReport(started=timestamp(started), seconds=round(time.time() - started, 3), runs=reports)


def _run_report(
    settings: LifecycleSettings, run: RunSettings, process: Processor, emit: Emit | None
) -> RunReport:
    report = RunReport(run=run.name, ok=True, steps=[], writing=[], unknown=[])
    try:
        found = survey_run(run, resend_after=settings.resend_after, lease_expiry=settings.lease_expiry)
        report.unchanged = found.unchanged
        report.leased = list(found.leased)
        report.writing = [step.name for step in found.discovery.steps if step.progress == "writing"]
        _note(found, report)
        for key, pending in found.deliver:
            sent = redeliver(found.ledger, key, pending, sinks=settings.alert_urls(run), emit=emit)
            if sent is not None:
                report.redelivered += sent.ok
                report.undelivered += tuple(
                    f"{sent.problem} of {key.step} to {delivery.sink}: {delivery.error}"
                    for delivery in sent.deliveries
                    if not delivery.ok
                )
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
            report.ok = report.ok and step.outcome != "retry"
            if step.unreachable:
                report.error = f"storage did not answer while {name} was processed: {step.message}"
                break
    except EnvironmentFault as error:
        report.ok = False
        report.error = str(error)
    return report


def _note(found: RunSurvey, report: RunReport) -> None:
    """Write down what later passes must know: unknown names, and steps whose times tell nothing."""
    for step in found.note:
        found.ledger.create(provisional_key(step.name, step.survey), "seen", describe(step))
    if found.unknown and found.ledger.report_unknown(found.unknown):
        report.unknown = list(found.unknown)


def watch_once(settings: LifecycleSettings) -> PassReport:
    """One pass. Where nothing is due it ends after the listings; otherwise it runs as a Prefect flow.

    Raises:
        SettingsError: the settings turned out to be wrong.
        EnvironmentFault: Prefect does not work.
    """
    started = time.time()
    idle: list[RunReport] = []
    for run in settings.runs:
        try:
            found = survey_run(run, resend_after=settings.resend_after, lease_expiry=settings.lease_expiry)
        except StorageError as error:
            idle.append(RunReport(run=run.name, ok=False, error=str(error), steps=[], writing=[], unknown=[]))
            continue
        if not found.idle:
            from flows.watch import watch_in_flow

            return watch_in_flow(settings)
        writing = [step.name for step in found.discovery.steps if step.progress == "writing"]
        idle.append(
            RunReport(
                run=run.name,
                ok=True,
                steps=[],
                writing=writing,
                leased=list(found.leased),
                unknown=[],
                unchanged=found.unchanged,
            )
        )
    return PassReport(started=timestamp(started), seconds=round(time.time() - started, 3), runs=idle)


def process_directly(settings: LifecycleSettings, *, emit: Emit | None = None) -> Processor:
    """The `Processor` that needs no Prefect."""

    def process(run: RunSettings, step: str) -> StepReport:
        return process_step(Workshop.of(settings, run.name, emit=emit), step)

    return process
