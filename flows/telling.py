"""What people are told while one step is processed: that a stage failed, or that all is well after all."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from flows.following import FAILED, RECOVERED
from flows.next_command import shown_again_by
from flows.run_telling import tell_mistake, tell_partial
from flows.workshop import Workshop
from tasks.after import FollowUp, after_failures
from tasks.alert import Alert, AlertReport, alert_for_failure, raise_alert
from tasks.ledger import Failure, LedgerRecord, StepKey, timestamp
from tasks.partial import Shortfall
from tasks.publish import PublishReport
from tasks.text import typed


class Teller:
    """Raises the alerts of one step and keeps what became of them in ``alerts``."""

    def __init__(self, workshop: Workshop, url: str, changed: float | None) -> None:
        """``url`` is the step's; ``changed`` its last change in seconds since the epoch."""
        self.workshop = workshop
        self.ledger = workshop.ledger
        self.url = url
        self.changed = changed
        self.alerts: list[AlertReport] = []

    def failed(self, key: StepKey, failure: Failure) -> None:
        """Tell of a failed stage, once for each problem of these bytes."""
        config = str(self.workshop.settings.file)
        again = shown_again_by(self.workshop.run, self.url, failure)
        alert = alert_for_failure(
            self.ledger, key, failure, url=self.url, since=self.changed, config=config, again=again
        )
        if failure.problem == "key-mismatch":
            alert = replace(alert, advice=f"{alert.advice}\n{self._acceptance()}".strip())
        self._raise(key, alert)

    def _acceptance(self) -> str:
        """How to say that a step's keys are meant."""
        workshop = self.workshop
        if workshop.run.expectation == "previous":
            command = typed("ckpt", "run", self.url, "--accept-keys", "--config", workshop.settings.file)
            return f"If this change is meant, accept the keys from this step on: {command}"
        command = f"{typed('ckpt', 'contract', self.url)} > {shlex.quote(workshop.run.expectation)}"
        return f"If this change is meant, expect the new keys: {command}"

    def mistaken(self, mistake: str, step: str) -> None:
        """Tell that a setting does not fit the step."""
        workshop = self.workshop
        self.alerts.append(
            tell_mistake(workshop.settings, workshop.run, self.ledger, mistake, step, workshop.emit)
        )

    def followed(self, key: StepKey, report: FollowUp | None) -> None:
        """Tell that what follows a publication failed for good, or succeeded after that was told."""
        after = self.workshop.run.after_publish
        if report is None or after is None:
            return
        if not report.ok:
            if report.attempts >= after.max_attempts:
                self._follow_alert(key, FAILED, report.message, since=self._first_attempt(key))
        elif report.attempts:
            known = [record.facts.get("problem") for record in self._told(key.step) if record.key == key]
            if FAILED in known:
                self._follow_alert(key, RECOVERED, report.message)

    def partial(self, lacking: Sequence[Shortfall], report: PublishReport) -> None:
        """Tell that what is published lacks tensors, once for all steps of the run that lack the same."""
        workshop = self.workshop
        self.alerts.append(
            tell_partial(workshop.settings, workshop.run, self.ledger, lacking, report.url, workshop.emit)
        )

    def _first_attempt(self, key: StepKey) -> str:
        """Since when what should follow has been failing."""
        return self.ledger.read(key, after_failures(self.ledger.stages(key))[0]).when

    def _follow_alert(self, key: StepKey, problem: str, what: str, since: str | None = None) -> None:
        config = self.workshop.settings.file
        self._raise(
            key,
            Alert(
                run=self.ledger.run,
                step=key.step,
                fingerprint=key.fingerprint,
                problem=problem,
                what=what,
                where=self.url,
                since=since or timestamp(self.ledger.clock()),
                command=typed("ckpt", "run", self.url, "--config", config),
                advice="The step is published and can be used." if problem == FAILED else "",
            ),
        )

    def recovered(self, key: StepKey, report: PublishReport) -> None:
        """Say that a step which people were told about is published now."""
        problems = self._open_problems(key.step)
        if not problems:
            return
        first = min(problems, key=lambda record: record.when)
        names = ", ".join(sorted({str(record.facts.get("problem")) for record in problems}))
        self._raise(
            key,
            Alert(
                run=self.ledger.run,
                step=key.step,
                fingerprint=key.fingerprint,
                problem="recovered",
                what=f"published as {report.url}; told before: {names} (first at {first.when})",
                where=self.url,
                since=timestamp(self.ledger.clock()),
                command=typed("ckpt", "verify", report.url),
            ),
        )

    def _open_problems(self, step: str) -> list[LedgerRecord]:
        """Alerts of any bytes of the step that no recovery has followed."""
        told = [r for r in self._told(step) if not str(r.facts.get("problem")).startswith(FAILED)]
        recovered = max((r.when for r in told if r.facts.get("problem") == "recovered"), default="")
        return [r for r in told if r.facts.get("problem") != "recovered" and r.when > recovered]

    def _told(self, step: str) -> list[LedgerRecord]:
        return [
            self.ledger.read(key, record)
            for key, records in self.ledger.keys(step).items()
            for record in records
            if record.startswith("alerted") and "." not in record
        ]

    def _raise(self, key: StepKey, alert: Alert) -> None:
        workshop = self.workshop
        sinks = workshop.settings.alert_urls(workshop.run)
        self.alerts.append(raise_alert(self.ledger, key, alert, sinks=sinks, emit=workshop.emit))
