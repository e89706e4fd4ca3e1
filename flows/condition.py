"""How a run fares beside its steps: whether it still saves, whether alerts arrive, who is at work.

All of it comes from a survey that was made already, but for the claims of leases, which are read; nothing is
written. Only ``flows.status`` asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from dcp.findings import Report
from flows.settings import LifecycleSettings
from flows.survey import RunSurvey
from tasks.alert import EVENT_SINK
from tasks.leases import Leases
from tasks.ledger import RUN, timestamp
from tasks.run_health import rhythm_of
from tasks.sinks import sink_name

Saving = Literal["healthy", "stalled", "unknown"]
"""``unknown``: too few commits to have a rhythm, or a copy, whose times tell nothing."""
Sent = Literal["delivered", "failed", "never"]
Holding = Literal["alive", "silent", "ended"]
"""``silent``: no sign of life for `lease_expiry`, by this machine's clock. ``ended``: it was a process of
this machine that is no more. Either is taken over by whoever next processes the step."""


class SavingStatus(Report):
    """Whether the run still saves. Times in seconds."""

    state: Saving = "unknown"
    last: str | None = None
    """Step of the newest commit."""
    quiet: float | None = None
    """Since the newest commit."""
    usual: float | None = None
    """Between two commits, usually."""
    junk_bytes: int = 0
    """In steps that were never committed, where that is much."""


class SinkStatus(Report):
    """Where alerts go, and what became of the last one. ``when`` is UTC in ISO 8601."""

    sink: str
    """The URL without secrets, or ``prefect-event``."""
    state: Sent = "never"
    when: str | None = None
    problem: str | None = None
    step: str | None = None
    error: str | None = None


class LeaseStatus(Report):
    """A step that a worker has taken. ``since`` in ISO 8601; ``quiet`` seconds since a sign of life."""

    step: str
    who: str
    since: str | None = None
    quiet: float | None = None
    state: Holding


def saving_of(found: RunSurvey, now: float) -> SavingStatus:
    """Whether the run still saves; ``now`` in seconds since the epoch."""
    junk = found.junk.bytes if found.junk else 0
    rhythm = None if found.run.copied else rhythm_of(found.commits)
    if rhythm is None:
        return SavingStatus(junk_bytes=junk)
    return SavingStatus(
        state="stalled" if found.stall else "healthy",
        last=rhythm.last.step,
        quiet=round(max(0.0, now - rhythm.last.at), 3),
        usual=round(rhythm.usual, 3),
        junk_bytes=junk,
    )


def sinks_of(settings: LifecycleSettings, found: RunSurvey) -> list[SinkStatus]:
    """Every sink of the run's alerts, Prefect's events first."""
    sinks = [EVENT_SINK, *(sink_name(url) for url in settings.alert_urls(found.run))]
    last: dict[str, SinkStatus] = {}
    for when, step, problem, delivery in sorted(_deliveries(found), key=lambda sent: sent[0]):
        sink = str(delivery.get("sink"))
        last[sink] = SinkStatus(
            sink=sink,
            state="delivered" if delivery.get("ok") else "failed",
            when=timestamp(when),
            problem=problem,
            step=step,
            error=delivery.get("error"),
        )
    return [last.get(sink) or SinkStatus(sink=sink) for sink in sinks]


def _deliveries(found: RunSurvey) -> Iterator[tuple[float, str | None, str, dict[str, Any]]]:
    for key, summaries in found.snapshot.summaries.items():
        for stage, summary in summaries.items():
            if stage.startswith("alerted") and ".outcome-" in stage:
                step = None if key.step == RUN else key.step
                for delivery in summary.get("deliveries", ()):
                    yield float(summary.get("when", 0.0)), step, str(summary.get("problem", "")), delivery


def leases_of(found: RunSurvey, expiry: float, now: float) -> list[LeaseStatus]:
    """Who is working on which step.

    Args:
        expiry: seconds without a sign of life after which a holder is taken for dead.
        now: seconds since the epoch.

    Raises:
        StorageError: the ledger failed.
    """
    leases = Leases(found.ledger.store, expiry)
    held = []
    for standing in found.snapshot.leases.values():
        holder = leases.holder(standing)
        alive_at = standing.alive_at
        quiet = None if alive_at is None else max(0.0, now - alive_at)
        state: Holding = "alive"
        if holder is not None and holder.ended_here:
            state = "ended"
        elif quiet is not None and quiet >= expiry:
            state = "silent"
        held.append(
            LeaseStatus(
                step=standing.step,
                who=holder.who if holder else "unknown",
                since=holder.since if holder else None,
                quiet=None if quiet is None else round(quiet, 3),
                state=state,
            )
        )
    return held
