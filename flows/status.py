"""`run_status`: where steps stand, from listings and the ledger; it neither writes nor loads Prefect."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from pydantic import Field

from dcp.errors import EnvironmentFault
from dcp.findings import Report
from dcp.storage import join_url
from flows.condition import LeaseStatus, SavingStatus, SinkStatus, leases_of, saving_of, sinks_of
from flows.settings import LifecycleSettings, RunSettings
from flows.survey import RunSurvey, key_of, open_run_problems, survey_run
from tasks.alert import EVENT_SINK
from tasks.aliases import AliasRecord, aliases
from tasks.discover import FoundStep, compile_pattern, step_number
from tasks.ledger import DONE, RUN, Stage, StepKey, failures, timestamp
from tasks.manifest import published_directory
from tasks.partial import RECORD as PARTIAL
from tasks.retire import half_deleted
from tasks.snapshot import Snapshot, Summary

StepState = Literal[
    "published",
    "replaced",
    "in-progress",
    "problem",
    "failing",
    "writing",
    "waiting",
    "late",
    "deleting",
    "retired",
    "gone",
]
"""``waiting``: due, nothing done yet. ``failing``: the environment failed and will be tried again. ``late``:
left alone, since a later step was published before. ``replaced``: published, and saved over in the source
since; the step's row of its own says how its present bytes fare. ``deleting``: retention is at it. ``gone``:
no longer in the source and never published."""
StageState = Literal["done", "failed", "open"]
AlertState = Literal["delivered", "partly", "failed", "sending"]
"""``partly``: some sinks took it, others have refused it so far."""


class AlertStatus(Report):
    """One problem people were told about, and whether it reached them."""

    problem: str
    title: str = ""
    told: str
    state: AlertState
    deliveries: int
    over: bool = False
    """What a run was told of is over by now; it is listed because not everybody got it, or the news of it."""


class StepStatus(Report):
    """One step. ``bytes`` and ``files`` of its source; ``age`` in seconds since its last change."""

    step: str
    number: int
    state: StepState
    fingerprint: str | None = None
    stages: dict[Stage, StageState]
    bytes: int = 0
    files: int = 0
    age: float | None = None
    errors: int = 0
    warnings: int = 0
    attempts: int = 0
    """Failed attempts."""
    problem: str | None = None
    message: str = ""
    published: str | None = None
    """URL of the published directory."""
    partial: str = ""
    """What of the step's tensors the published files lack."""
    aliases: list[str]
    alerts: list[AlertStatus]


class RunStatus(Report):
    """One run. ``error`` says why it could not be read; then it has no steps."""

    run: str
    source: str
    publish: str
    ok: bool
    error: str | None = None
    latest: str | None = None
    """URL of the manifest that ``latest`` leads to."""
    aliases: dict[str, str]
    """Each alias and the step it leads to."""
    steps: list[StepStatus]
    unknown: list[str]
    """Directories in the source that are no steps."""
    alerts: list[AlertStatus] = Field(default_factory=list)
    """Of the run as a whole: those that are not over, and those that did not reach everybody."""
    saving: SavingStatus = Field(default_factory=SavingStatus)
    sinks: list[SinkStatus] = Field(default_factory=list)
    leases: list[LeaseStatus] = Field(default_factory=list)
    """Steps that workers have taken."""


class StatusReport(Report):
    """All runs of the settings. ``when`` is UTC in ISO 8601."""

    when: str
    ok: bool
    """Whether every run could be read."""
    runs: list[RunStatus]


def run_status(
    settings: LifecycleSettings, run: str | None = None, *, clock: Callable[[], float] = time.time
) -> StatusReport:
    """Where every step stands.

    Args:
        settings: the runs.
        run: only the run of this name.
        clock: seconds since the epoch.

    Raises:
        UsageError: there is no such run.
    """
    now = clock()
    chosen = [settings.run(run)] if run is not None else settings.runs
    runs = [_run_status(settings, one, now) for one in chosen]
    return StatusReport(when=timestamp(now), ok=all(one.ok for one in runs), runs=runs)


def _run_status(settings: LifecycleSettings, run: RunSettings, now: float) -> RunStatus:
    status = RunStatus(
        run=run.name, source=run.source, publish=run.publish, ok=True, aliases={}, steps=[], unknown=[]
    )
    try:
        found = survey_run(run, resend_after=settings.resend_after, now=now, remember=False)
        leads = aliases(found.ledger.run_store)
        status.leases = leases_of(found, settings.lease_expiry, now)
    except EnvironmentFault as error:
        status.ok = False
        status.error = str(error)
        return status
    latest = leads.get("latest")
    status.latest = join_url(run.publish, run.name, latest.manifest) if latest else None
    status.aliases = {name: record.step for name, record in leads.items()}
    status.unknown = list(found.discovery.unknown)
    status.alerts = _run_alerts(found.snapshot)
    status.saving = saving_of(found, now)
    status.sinks = sinks_of(settings, found)
    status.steps = [_step_status(found, step, leads) for step in found.discovery.steps]
    status.steps += _departed(found, leads)
    status.steps += _replaced(found, status.steps, leads)
    status.steps.sort(key=lambda step: (step.number, step.step, step.state != "replaced"))
    return status


def _step_status(found: RunSurvey, step: FoundStep, leads: dict[str, AliasRecord]) -> StepStatus:
    key = key_of(step, found.snapshot)
    status = _known(found, step.name, step.number, key, leads)
    changed: dict[str, object] = {
        "bytes": step.bytes,
        "files": len(step.survey.objects),
        "age": None if step.quiet is None else round(step.quiet, 3),
    }
    if key is None and half_deleted(step, found.snapshot):
        changed["state"] = "deleting"
    elif step.progress == "writing":
        changed["state"] = "writing"
    elif step.name in found.late:
        changed["state"] = "late"
    elif step.name in found.leased and status.state in ("waiting", "failing"):
        changed["state"] = "in-progress"
    return status.model_copy(update=changed)


def _departed(found: RunSurvey, leads: dict[str, AliasRecord]) -> list[StepStatus]:
    """Steps that the ledger knows and the source has no more."""
    patterns = [compile_pattern(pattern) for pattern in found.run.step_pattern]
    present = {step.name for step in found.discovery.steps}
    gone = []
    for name, keys in found.snapshot.by_step.items():
        number = step_number(name, patterns)
        if name in present or number is None:
            continue
        newest = max(keys, key=lambda key: _when(found.snapshot, key))
        status = _known(found, name, number, newest, leads)
        if status.state not in ("published", "retired"):
            status = status.model_copy(update={"state": "gone"})
        gone.append(status)
    return gone


def _replaced(found: RunSurvey, shown: list[StepStatus], leads: dict[str, AliasRecord]) -> list[StepStatus]:
    """What else is published of steps that were saved more than once, the first published first."""
    rows = []
    for step in shown:
        others = [
            key
            for key in found.snapshot.by_step.get(step.step, ())
            if key.fingerprint != step.fingerprint
            and "published" in found.snapshot.of(key)
            # What is left of these bytes is the step's own row.
            and not (step.state == "deleting" and "deleting" in found.snapshot.of(key))
        ]
        rows += [
            _known(found, step.step, step.number, key, leads).model_copy(update={"state": "replaced"})
            for key in sorted(others, key=lambda key: _when(found.snapshot, key))
        ]
    return rows


def _when(snapshot: Snapshot, key: StepKey) -> tuple[bool, float]:
    return "published" in snapshot.of(key), float(snapshot.summary(key, "seen").get("when", 0.0))


def _known(
    found: RunSurvey, name: str, number: int, key: StepKey | None, leads: dict[str, AliasRecord]
) -> StepStatus:
    """What the ledger knows of a step's bytes."""
    snapshot = found.snapshot
    stages = snapshot.of(key) if key else frozenset()
    attempts = len(failures(stages))
    failure: Summary = (snapshot.last_failure(key) if key else None) or {}
    done = "published" in stages
    settled = bool(failure) and (failure.get("final") or attempts >= found.run.max_attempts)
    state: StepState
    if "retired" in stages:
        state = "retired"
    elif done:
        state = "published"
    elif failure:
        state = "problem" if settled else "failing"
    else:
        state = "in-progress" if stages - {"seen"} else "waiting"
    return StepStatus(
        step=name,
        number=number,
        state=state,
        fingerprint=key.fingerprint if key else None,
        stages={stage: _stage_state(stage, stages, failure) for stage in DONE},
        errors=0 if done else int(failure.get("errors", 0)),
        warnings=int(snapshot.summary(key, "validated").get("warnings", 0)) if key else 0,
        attempts=attempts,
        problem=None if done else failure.get("problem"),
        message="" if done else str(failure.get("message", "")),
        published=join_url(found.run.publish, found.run.name, published_directory(key))
        if key and done
        else None,
        partial=str(snapshot.summary(key, PARTIAL).get("message", "")) if key and done else "",
        aliases=sorted(
            alias
            for alias, record in leads.items()
            if key and (record.step, record.fingerprint) == (key.step, key.fingerprint)
        ),
        alerts=_alerts(snapshot, key) if key else [],
    )


def _run_alerts(snapshot: Snapshot) -> list[AlertStatus]:
    still = set(open_run_problems(snapshot).values())
    alerts = [
        alert.model_copy(update={"over": key not in still})
        for key in snapshot.by_step.get(RUN, ())
        for alert in _alerts(snapshot, key)
        if alert.state != "delivered" or (key in still and alert.problem != "recovered")
    ]
    return sorted(alerts, key=lambda alert: alert.told)


def _stage_state(stage: Stage, stages: frozenset[str], failure: Summary) -> StageState:
    if DONE[stage] in stages:
        return "done"
    return "failed" if failure.get("stage") == stage else "open"


def _alerts(snapshot: Snapshot, key: StepKey) -> list[AlertStatus]:
    stages = snapshot.of(key)
    found = []
    for record in sorted(stage for stage in stages if stage.startswith("alerted") and "." not in stage):
        outcomes = [
            snapshot.summary(key, stage) for stage in stages if stage.startswith(f"{record}.outcome-")
        ]
        summary = snapshot.summary(key, record)
        found.append(
            AlertStatus(
                problem=str(summary.get("problem", "")),
                title=str(summary.get("title", "")),
                told=timestamp(float(summary.get("when", 0.0))),
                state=_alert_state(outcomes),
                deliveries=len(outcomes),
            )
        )
    return found


def _alert_state(outcomes: list[Summary]) -> AlertState:
    if not outcomes:
        return "sending"
    if any(outcome.get("ok") for outcome in outcomes):
        return "delivered"
    sent = [each for outcome in outcomes for each in outcome.get("deliveries", ())]
    # An event reaches nobody by itself.
    taken = any(each.get("ok") and each.get("sink") != EVENT_SINK for each in sent)
    return "partly" if taken else "failed"
