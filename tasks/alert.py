"""The stage *alert*: people are told once of each problem of each step's bytes.

Creating the record decides who tells: ``alerted`` for the first problem of a fingerprint,
``alerted-<problem>`` for each other one. Record first, then send: whoever created the record delivers, and
records the outcome as ``<record>.outcome-N``. A record without outcome after `resend_after` seconds means
that its sender vanished; one more worker may claim ``<record>.try-N`` and send again, once. A delivery that
failed is tried again on later passes, at the sinks that it did not reach, after ever longer pauses and
`MAX_DELIVERIES` times in all. Both are visible in the ledger, and neither stops the pipeline.

An `Alert` is what people read: what, where, since when, and what to type next. Delivery goes to a Prefect
event (through the `Emit` that the flow hands in) and to apprise URLs (`tasks.sinks`).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

from dcp.advice import advice_for
from dcp.errors import ChangedError
from dcp.findings import Code, Report
from tasks.ledger import Failure, Ledger, StepKey, timestamp
from tasks.sinks import Delivery, send_all, sink_name
from tasks.text import plain, typed

TITLES: dict[str, str] = {
    "incomplete": "was never committed",
    "torn": "is torn",
    "invalid": "is invalid",
    "key-mismatch": "does not have the expected keys",
    "validate": "could not be validated",
    "test-load": "failed its test-load",
    "export": "could not be exported",
    "publish": "could not be published",
    "after-publish": "is published, but what should follow failed",
    "after-publish-recovered": "is published, and what should follow succeeded after all",
    "recovered": "is published after all",
    "damaged": "is published and has been damaged since",
}
"""Every problem and how a title says it."""

MAX_DELIVERIES = 8
"""Attempts to deliver one alert, each on another pass: the last some hours after the first."""

EVENT_SINK = "prefect-event"

_SLOWER = 4
"""By what the pause before each next attempt is longer than the one before."""
_LONGEST_PAUSE = 3600.0
_CODES = frozenset(get_args(Code))

Emit = Callable[["Alert"], None]
"""Emits a Prefect event for an alert."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One thing to tell. ``since`` and everything else is text, safe to print."""

    run: str
    step: str
    fingerprint: str
    problem: str
    what: str
    where: str
    since: str
    command: str
    advice: str = ""
    headline: str = ""
    """What the title says after the run, in place of a step and its problem."""

    @property
    def event(self) -> str:
        """Name of the Prefect event."""
        return f"checkpoint.{self.problem}"

    @property
    def resource(self) -> str:
        """Prefect's resource id of the step, or of the run."""
        return f"checkpoint.{self.run}.{self.step}" if self.step else f"checkpoint.{self.run}"

    @property
    def title(self) -> str:
        said = self.headline or f"{self.step} {TITLES.get(self.problem, self.problem)}"
        return f"[{self.run}] {said}"

    @property
    def body(self) -> str:
        lines = [
            f"What: {self.what}",
            f"Where: {self.where}",
            f"Since: {self.since}",
            f"Next: {self.command}",
        ]
        return "\n".join([*lines, self.advice] if self.advice else lines)


class AlertReport(Report):
    """What was done about one problem. ``first`` is False where it had been told before."""

    problem: str
    record: str
    first: bool
    ok: bool
    deliveries: list[Delivery]


def alert_for_failure(
    ledger: Ledger,
    key: StepKey,
    failure: Failure,
    *,
    url: str,
    since: float | None,
    config: str = "",
    again: str = "",
) -> Alert:
    """The alert that a failed stage makes.

    Args:
        ledger: of the run.
        key: the bytes concerned.
        failure: why.
        url: the step in the source.
        since: last change of the step, seconds since the epoch.
        config: path of the settings file, for the command to type.
        again: the command that shows a failure of the checkpoint itself again.
    """
    command = again
    if not command:
        command = typed("ckpt", "run", url, *(("--config", config) if config else ()))
    return Alert(
        run=ledger.run,
        step=key.step,
        fingerprint=key.fingerprint,
        problem=failure.problem,
        what=plain(failure.message),
        where=url,
        since=timestamp(since if since is not None else ledger.clock()),
        command=command,
        advice=_advice(failure, url),
    )


def _advice(failure: Failure, url: str) -> str:
    """What to do about the first of the failure's codes that is known."""
    if failure.error == ChangedError.__name__:
        return (
            "It was saved over while it was being processed. Nothing is left to do: once the new save is "
            "complete, the step is processed again by itself."
        )
    code = next((code for code in failure.codes if code in _CODES), None)
    if code is None:
        return ""
    known: dict[str, str] = {"earlier": shlex.quote(failure.expected)} if failure.expected else {}
    return advice_for(code, shlex.quote(url), **known)  # type: ignore[arg-type]  # it is one of Code


def raise_alert(
    ledger: Ledger,
    key: StepKey,
    alert: Alert,
    *,
    sinks: Sequence[str],
    emit: Emit | None,
    facts: Mapping[str, Any] | None = None,
) -> AlertReport:
    """Tell people, unless this problem of these bytes has been told before.

    Args:
        ledger: of the run.
        key: the bytes concerned.
        alert: what to tell.
        sinks: apprise URLs.
        emit: emits the Prefect event.
        facts: what the record is to hold beside the alert.

    Raises:
        StorageError: the ledger failed. A sink that fails raises nothing.
    """
    facts = {**(facts or {}), **asdict(alert), "title": alert.title}
    record = "alerted"
    first = ledger.create(key, record, facts)
    if not first and ledger.read(key, record).facts.get("problem") != alert.problem:
        record = f"alerted-{alert.problem}"
        first = ledger.create(key, record, facts)
    if not first:
        return AlertReport(problem=alert.problem, record=record, first=False, ok=True, deliveries=[])
    return _deliver(ledger, key, record, 1, alert, sinks, emit)


def tell_unrecorded(alert: Alert, *, sinks: Sequence[str], emit: Emit | None) -> AlertReport:
    """Tell people of what no ledger can record; that it is told once is for the caller to see to."""
    deliveries = _sent(alert, sinks, emit)
    ok = all(delivery.ok for delivery in deliveries)
    return AlertReport(problem=alert.problem, record="", first=True, ok=ok, deliveries=deliveries)


def told(stages: Mapping[str, Mapping[str, Any]] | frozenset[str], first: str | None, problem: str) -> bool:
    """Whether ``problem`` has been told, from the names of records and the problem of ``alerted``."""
    return ("alerted" in stages and first == problem) or f"alerted-{problem}" in stages


@dataclass(frozen=True, slots=True)
class Pending:
    """A delivery that is due: attempt ``number`` of the alert recorded as ``record``."""

    record: str
    number: int


def pending_deliveries(
    stages: frozenset[str], facts: Callable[[str], Mapping[str, Any]], now: float, resend_after: float
) -> list[Pending]:
    """Deliveries that some worker should attempt now.

    Args:
        stages: names of a key's records.
        facts: gives ``when`` of an alert and of a try, and ``ok`` of an outcome.
        now: seconds since the epoch.
        resend_after: seconds after which an alert without outcome is taken over, and far more than sending
            takes; also the pause after the first attempt that failed.
    """
    due = []
    for record in sorted(s for s in stages if s.startswith("alerted") and "." not in s):
        number, vanished = 1, 0
        while f"{record}.try-{number + 1}" in stages:
            vanished += f"{record}.outcome-{number}" not in stages
            number += 1
        if f"{record}.outcome-{number}" in stages:
            outcome = facts(f"{record}.outcome-{number}")
            if outcome.get("ok") or number >= MAX_DELIVERIES:
                continue
            if now - outcome.get("when", now) < _pause(number, resend_after):
                continue
        else:
            claimed = facts(record if number == 1 else f"{record}.try-{number}").get("when", now)
            # A second sender that vanished is not replaced: better a visible gap than a flood.
            if vanished or now - claimed < resend_after:
                continue
        due.append(Pending(record, number + 1))
    return due


def _pause(number: int, resend_after: float) -> float:
    """Seconds after a delivery's failed attempt ``number`` until the next one."""
    return min(resend_after * float(_SLOWER) ** (number - 1), max(resend_after, _LONGEST_PAUSE))


def redeliver(
    ledger: Ledger, key: StepKey, pending: Pending, *, sinks: Sequence[str], emit: Emit | None
) -> AlertReport | None:
    """Attempt a due delivery; None if another worker has claimed it."""
    if not ledger.create(key, f"{pending.record}.try-{pending.number}"):
        return None
    facts = ledger.read(key, pending.record).facts
    alert = Alert(**{field.name: facts[field.name] for field in fields(Alert) if field.name in facts})
    return _deliver(ledger, key, pending.record, pending.number, alert, sinks, emit)


def _deliver(
    ledger: Ledger,
    key: StepKey,
    record: str,
    number: int,
    alert: Alert,
    sinks: Sequence[str],
    emit: Emit | None,
) -> AlertReport:
    done = _delivered_before(ledger, key, record, number)
    wanted = [sink for sink in sinks if sink_name(sink) not in done]
    deliveries = _sent(alert, wanted, None if EVENT_SINK in done else emit)
    ok = all(delivery.ok for delivery in deliveries)
    ledger.create(
        key,
        f"{record}.outcome-{number}",
        {"ok": ok, "problem": alert.problem, "deliveries": [d.model_dump(mode="json") for d in deliveries]},
    )
    return AlertReport(problem=alert.problem, record=record, first=True, ok=ok, deliveries=deliveries)


def _sent(alert: Alert, sinks: Sequence[str], emit: Emit | None) -> list[Delivery]:
    deliveries = [] if emit is None else [_emitted(alert, emit)]
    return deliveries + send_all(sinks, title=alert.title, body=alert.body)


def _delivered_before(ledger: Ledger, key: StepKey, record: str, number: int) -> set[str]:
    """Sinks that an earlier attempt reached."""
    done: set[str] = set()
    known = ledger.stages(key) if number > 1 else frozenset()
    for earlier in range(1, number):
        if f"{record}.outcome-{earlier}" in known:
            facts = ledger.read(key, f"{record}.outcome-{earlier}").facts
            done |= {d["sink"] for d in facts.get("deliveries", ()) if d.get("ok")}
    return done


def _emitted(alert: Alert, emit: Emit) -> Delivery:
    try:
        emit(alert)
    # Whatever the event client raises, the alert goes on to the other sinks.
    except Exception as error:
        return Delivery(sink=EVENT_SINK, ok=False, attempts=1, error=f"{type(error).__name__}: {error}"[:300])
    return Delivery(sink=EVENT_SINK, ok=True, attempts=1)
