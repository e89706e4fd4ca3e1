"""One step through its life: validate, test-load, export, publish; what failed is recorded and told.

`process_step` may be called any number of times, by any number of workers, and after any crash: a stage
whose record stands in the ledger is skipped, so it ends where it would have ended without interruption.
Stages are run through a `Call`, which is a plain call here and a Prefect task in `flows.process`.
"""

from __future__ import annotations

import logging
import time

from dcp.checkpoint import survey
from dcp.errors import NotFoundError, StorageError, UsageError
from dcp.storage import join_url
from flows.following import follow, is_due, publication_of
from flows.stages import Stages
from flows.step_work import Busy, Changing, Stopped
from flows.workshop import Outcome, StageOutcome, StepGoneError, StepReport, Workshop
from tasks.after import last_attempt
from tasks.discover import (
    Sighting,
    compile_pattern,
    describe,
    judge,
    sighting_of,
    step_number,
)
from tasks.leases import Lease, LeaseLostError
from tasks.ledger import DONE, Failure, Ledger, failures
from tasks.leftovers import sweep_superseded

_log = logging.getLogger(__name__)


def process_step(
    workshop: Workshop, step: str, *, force: bool = False, accept_keys: bool = False
) -> StepReport:
    """Take a step as far as it will go.

    Args:
        workshop: of the step's run.
        step: name of its directory.
        force: try again what has failed for good, and beyond the limit of attempts.
        accept_keys: its keys are meant, though they are not those of the step before.

    Raises:
        UsageError: ``step`` is no step's name, or steps are not held against those before them.
        SettingsError: the contract file in the settings is absent, or no contract.
        StageSettingsError: the settings ask for what cannot be done with this step.
        StepGoneError: it is not in the source any more.
        StorageError: source or ledger cannot be listed or written; nothing is known of the step.
    """
    run = workshop.run
    number = step_number(step, [compile_pattern(pattern) for pattern in run.step_pattern])
    if number is None:
        raise UsageError(f"{step!r} is no step of run {run.name!r}: it matches none of its step patterns")
    if accept_keys and run.expectation != "previous":
        raise UsageError(
            f"steps of run {run.name!r} are not held against the step before ({run.expectation!r}); "
            "to expect other keys write a new contract: ckpt contract URL > FILE"
        )
    url = join_url(run.source, step)
    try:
        surveyed = survey(url, **run.options)
    except NotFoundError as error:
        raise StepGoneError(str(error), url) from None
    found = judge(
        step,
        number,
        surveyed,
        parts=run.parts,
        grace_seconds=run.grace_period,
        now=time.time(),
        sightings=lambda name: _sightings(workshop.ledger, name),
    )
    return _Process(workshop, found, url, force=force, accept_keys=accept_keys).run()


def _sightings(ledger: Ledger, step: str) -> list[Sighting]:
    seen = [ledger.read(key, "seen") for key, stages in ledger.keys(step).items() if "seen" in stages]
    return [sighting_of(record.facts, record.at) for record in seen]


class _Process(Stages):
    def run(self) -> StepReport:
        if self.found.progress == "writing":
            return self._writing()
        standing = self._standing()
        if standing is not None:
            return standing
        lease = self.workshop.leases.acquire(self.found.name)
        if lease is None:
            return self._report("leased", message="another worker is processing it")
        with lease:
            # Whoever held it before may have finished since the records were listed.
            self.look_up()
            return self._standing() or self._work(lease)

    def _work(self, lease: Lease) -> StepReport:
        try:
            if "published" not in self.records:
                self.validate()
                self._sweep()
                self.test_load()
                artifacts = self.export()
                lease.require()
                self.publish(artifacts)
            return self._follow()
        except Stopped as stopped:
            return self._stopped(stopped)
        except Changing:
            return self._report("writing", message="it changed while it was being looked at")
        except (LeaseLostError, Busy) as other:
            return self._report("leased", message=str(other))

    def _sweep(self) -> None:
        """Remove what was exported of bytes that this step had before and that were never published."""
        try:
            sweep_superseded(self.ledger, self.key, self.workshop.leases)
        except StorageError as error:
            # It is only about space; whether storage works is for the next stage to find out.
            _log.warning("files of an earlier save of %s could not be removed: %s", self.found.name, error)

    def _follow(self) -> StepReport:
        """The report of a published step, after one attempt at what follows if that is due."""
        run = self.settings_of_run
        if is_due(run.after_publish, self.ledger.stages(self.key), force=self.force):
            facts = self.ledger.read(self.key, "published").facts
            publication = publication_of(self.workshop, self.key, self.found.number, facts)
            self.after = follow(self.workshop, publication, self.key)
            self.teller.followed(self.key, self.after)
        return self._report("published", published=self.directory)

    # --- what the ledger says already

    def _writing(self) -> StepReport:
        if self.found.quiet is None:
            # Only our own clock can tell how long nothing changes; it starts now.
            self.ledger.create(self.key, "seen", describe(self.found))
        missing = ", ".join(self.found.missing[:5])
        return self._report("writing", message=f"no {missing} yet" if missing else "still being written")

    def _standing(self) -> StepReport | None:
        """The report of a step on which the ledger has the last word."""
        if "published" in self.records:
            self.accept()
            if is_due(self.settings_of_run.after_publish, self.records, force=self.force):
                return None
            self.teller.followed(self.key, last_attempt(self.ledger, self.key, self.records))
            for stage in DONE:
                self.stages.append(StageOutcome(stage=stage, outcome="skipped"))
            return self._report("published", published=self.directory)
        numbered = failures(self.records)
        if not numbered or self.force:
            return None
        failure = Failure.model_validate(self.ledger.read(self.key, numbered[-1]).facts)
        if failure.problem == "key-mismatch" and failure.basis != self.accepted.basis(self.found.number):
            return None
        if not failure.final and len(numbered) < self.settings_of_run.max_attempts:
            return None
        self.teller.failed(self.key, failure)
        return self._failed(failure, len(numbered), "problem")

    def _stopped(self, stopped: Stopped) -> StepReport:
        failure, number = stopped.args
        if failure.final or number >= self.settings_of_run.max_attempts:
            self.teller.failed(self.key, failure)
            return self._failed(failure, number, "problem")
        return self._failed(failure, number, "retry")

    def _failed(self, failure: Failure, attempts: int, outcome: Outcome) -> StepReport:
        return self._report(outcome, problem=failure.problem, message=failure.message, attempts=attempts)

    def _report(
        self,
        outcome: Outcome,
        *,
        problem: str | None = None,
        message: str = "",
        attempts: int = 0,
        published: str | None = None,
    ) -> StepReport:
        return StepReport(
            run=self.settings_of_run.name,
            step=self.found.name,
            number=self.found.number,
            url=self.url,
            fingerprint=self.key.fingerprint,
            outcome=outcome,
            problem=problem,
            message=message,
            attempts=attempts,
            stages=self.stages,
            published=published,
            partial=self.partial,
            after=self.after,
            alerts=self.teller.alerts,
            unreachable=self.unreachable,
        )
