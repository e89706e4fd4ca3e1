"""What people are told while one step is processed: that a stage failed, or that all is well after all."""

from __future__ import annotations

from flows.workshop import Workshop
from tasks.alert import Alert, AlertReport, alert_for_failure, raise_alert
from tasks.ledger import Failure, LedgerRecord, StepKey, timestamp
from tasks.publish import PublishReport


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
        self._raise(
            key,
            alert_for_failure(self.ledger, key, failure, url=self.url, since=self.changed, config=config),
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
                command=f"ckpt verify {report.url}",
            ),
        )

    def _open_problems(self, step: str) -> list[LedgerRecord]:
        """Alerts of any bytes of the step that no recovery has followed."""
        told = [
            self.ledger.read(key, record)
            for key, records in self.ledger.keys(step).items()
            for record in records
            if record.startswith("alerted") and "." not in record
        ]
        recovered = max((r.when for r in told if r.facts.get("problem") == "recovered"), default="")
        return [r for r in told if r.facts.get("problem") != "recovered" and r.when > recovered]

    def _raise(self, key: StepKey, alert: Alert) -> None:
        workshop = self.workshop
        sinks = workshop.settings.alert_urls(workshop.run)
        self.alerts.append(raise_alert(self.ledger, key, alert, sinks=sinks, emit=workshop.emit))
