"""Whether the storage of a run can be reached at all; where it stays out of reach, people are told once.

An outage is a `StepKey` under `RUN`: ``seen`` since the first pass that it failed, ``alerted`` once it has
lasted for `unreachable_after`, and over with ``restored-1`` or, if it was told, with the alert of its
recovery. The next outage has the next key. Where it is the ledger that is out of reach, the machine remembers
(`flows.unnoted`), and people are told once by each machine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from dcp.errors import EnvironmentFault, StorageError
from flows.settings import LifecycleSettings, RunSettings
from flows.unnoted import Unnoted
from tasks.alert import Alert, AlertReport, Emit, raise_alert, tell_unrecorded
from tasks.ledger import Ledger, StepKey, timestamp
from tasks.run_health import run_key
from tasks.snapshot import Snapshot, take_snapshot
from tasks.text import plain, typed

PROBLEM = "unreachable"

_OVER = "restored-1"
_CLOSED = frozenset({_OVER, "alerted-recovered"})


@dataclass(frozen=True, slots=True)
class Outage:
    """An outage that people are to be told of; ``since`` in seconds since the epoch."""

    ledger: Ledger
    key: StepKey
    since: float


def due_outage(settings: LifecycleSettings, run: RunSettings) -> Outage | None:
    """Note that a run's storage failed just now; the outage, if it has lasted and was never told."""
    try:
        ledger = Ledger.open(run.publish, run.name, **run.publish_options)
        snapshot = take_snapshot(ledger, remember=False)
        key = _current(snapshot)
        now = ledger.clock()
        if "seen" in snapshot.of(key):
            since = float(snapshot.summary(key, "seen").get("when", now))
        else:
            since = now
            ledger.create(key, "seen", {})
    except EnvironmentFault:
        return None
    told = "alerted" in snapshot.of(key)
    return None if told or now - since < settings.unreachable_after else Outage(ledger, key, since)


def tell_outage(
    settings: LifecycleSettings, run: RunSettings, outage: Outage, error: StorageError, emit: Emit | None
) -> AlertReport:
    """Tell that storage has been out of reach.

    Raises:
        StorageError: the ledger failed.
    """
    alert = _alert(settings, run, error, outage.since)
    sinks = settings.alert_urls(run)
    return raise_alert(outage.ledger, outage.key, alert, sinks=sinks, emit=emit)


def due_unnoted(settings: LifecycleSettings, run: RunSettings, error: StorageError) -> float | None:
    """Note that a run's ledger failed; since when it has, if that is to be told and nobody has done so."""
    if not (error.url or "").startswith(run.publish):
        return None
    unnoted = Unnoted(run)
    since = unnoted.since()
    if since is None or unnoted.told or unnoted.now() - since < settings.unreachable_after:
        return None
    return since


def tell_unnoted(
    settings: LifecycleSettings, run: RunSettings, error: StorageError, emit: Emit | None
) -> list[AlertReport]:
    """Tell that a run's ledger has been out of reach, if it has for long enough and nobody here has told."""
    since = due_unnoted(settings, run, error)
    unnoted = Unnoted(run)
    if since is None or not unnoted.claim():
        return []
    report = tell_unrecorded(_alert(settings, run, error, since), sinks=settings.alert_urls(run), emit=emit)
    if report.deliveries and not any(delivery.ok for delivery in report.deliveries):
        unnoted.withdraw()
    return [report]


def tell_return(settings: LifecycleSettings, run: RunSettings, emit: Emit | None) -> list[AlertReport]:
    """Note that a run's ledger answers, and tell so if people had been told that it does not."""
    if not Unnoted(run).over():
        return []
    alert = Alert(
        run=run.name,
        step="",
        fingerprint="",
        problem="recovered",
        headline="its storage can be reached again",
        what="a pass could read and write all it needs; told before: its storage cannot be reached",
        where=run.publish,
        since=timestamp(time.time()),
        command=typed("ckpt", "status", "--run", run.name, "--config", settings.file),
    )
    return [tell_unrecorded(alert, sinks=settings.alert_urls(run), emit=emit)]


def _alert(settings: LifecycleSettings, run: RunSettings, error: StorageError, since: float) -> Alert:
    return Alert(
        run=run.name,
        step="",
        fingerprint="",
        problem=PROBLEM,
        headline="its storage cannot be reached",
        what=plain(str(error)),
        where=error.url or run.source,
        since=timestamp(since),
        command=typed("ckpt", "watch", "--once", "--config", settings.file),
        advice="Restore the place, its credentials or its permissions; the next pass goes on by itself. "
        "Until then nothing is known of its steps, and none is called bad.",
    )


def end_outage(ledger: Ledger, snapshot: Snapshot) -> None:
    """Note that storage answers again after an outage that was not told.

    Raises:
        StorageError: the ledger failed.
    """
    key = _current(snapshot)
    stages = snapshot.of(key)
    if "seen" in stages and "alerted" not in stages:
        ledger.create(key, _OVER, {})


def _current(snapshot: Snapshot) -> StepKey:
    """The key of the outage that goes on, or of the next one."""
    number = 1
    while snapshot.of(run_key(PROBLEM, str(number))) & _CLOSED:
        number += 1
    return run_key(PROBLEM, str(number))
