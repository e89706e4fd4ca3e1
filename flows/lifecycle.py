"""One step through its life: validate, test-load, export, publish; what failed is recorded and told.

`process_step` may be called any number of times, by any number of workers, and after any crash: a stage
whose record stands in the ledger is skipped, so it ends where it would have ended without interruption.
Stages are run through a `Call`, which is a plain call here and a Prefect task in `flows.process`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NoReturn, ParamSpec, TypeVar

from dcp.checkpoint import Kind, survey
from dcp.checks.scrub import TensorHealth
from dcp.errors import ChangedError, CheckpointError, NotFoundError, SettingsError, StorageError, UsageError
from dcp.findings import Finding
from dcp.storage import join_url, open_store
from flows.following import announce, follow, is_due, publication_of
from flows.report.health import norms_by_group
from flows.report.publication import publish_page
from flows.telling import Teller
from flows.workshop import Outcome, StageOutcome, StepGoneError, StepReport, Workshop
from tasks.acceptance import Accepted, accept, accepted_keys
from tasks.after import FollowUp, last_attempt
from tasks.discover import (
    FoundStep,
    Sighting,
    compile_pattern,
    describe,
    judge,
    provisional_key,
    sighting_of,
    step_number,
)
from tasks.export import ExportRequest, artifacts_stand, export_step
from tasks.handover import artifacts_of, facts_of
from tasks.leases import Lease, LeaseLostError
from tasks.ledger import DONE, Failure, Ledger, Stage, StepKey, failures
from tasks.load_check import load_check_step
from tasks.manifest import Artifact, published_directory
from tasks.outcomes import failure_of_error, failure_of_report, problem_of
from tasks.publish import PublishReport, publish_step, require_unchanged
from tasks.validate import keep_contract, step_contract, validate_step

P = ParamSpec("P")
R = TypeVar("R")

WARNINGS_KEPT = 200


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


class _Stopped(Exception):
    """A stage failed and this is recorded."""


class _Process:
    def __init__(
        self, workshop: Workshop, found: FoundStep, url: str, *, force: bool, accept_keys: bool
    ) -> None:
        self.workshop = workshop
        self.force = force
        self.accept_keys = accept_keys
        self.settings_of_run = workshop.run
        self.ledger = workshop.ledger
        self.call = workshop.call
        self.teller = Teller(workshop, url, found.survey.last_change)
        self.found = found
        self.url = url
        self.listing = found.survey.listing_identity
        self._look_up()
        self.stages: list[StageOutcome] = []
        self.tensors: Mapping[str, TensorHealth] | None = None
        self.unreachable = False
        self.after: FollowUp | None = None

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
            self._look_up()
            return self._standing() or self._work(lease)

    def _look_up(self) -> None:
        """Find out what the ledger knows of the step."""
        provisional = provisional_key(self.found.name, self.found.survey)
        self.key = self.ledger.find(self.found.name, self.listing, provisional) or provisional
        self.records = self.ledger.stages(self.key)

    def _work(self, lease: Lease) -> StepReport:
        try:
            if "published" not in self.records:
                self._validate()
                self._test_load()
                artifacts = self._export()
                lease.require()
                self._publish(artifacts)
            return self._follow()
        except _Stopped as stopped:
            return self._stopped(stopped)
        except _Changing:
            return self._report("writing", message="it changed while it was being looked at")
        except LeaseLostError as lost:
            return self._report("leased", message=str(lost))

    def _follow(self) -> StepReport:
        """The report of a published step, after one attempt at what follows if that is due."""
        run = self.settings_of_run
        if is_due(run.after_publish, self.ledger.stages(self.key), force=self.force):
            facts = self.ledger.read(self.key, "published").facts
            publication = publication_of(self.workshop, self.key, self.found.number, facts)
            self.after = follow(self.workshop, publication, self.key)
            self.teller.followed(self.key, self.after)
        return self._report("published", published=self._directory)

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
            self._accept()
            if is_due(self.settings_of_run.after_publish, self.records, force=self.force):
                return None
            self.teller.followed(self.key, last_attempt(self.ledger, self.key, self.records))
            for stage in DONE:
                self.stages.append(StageOutcome(stage=stage, outcome="skipped"))
            return self._report("published", published=self._directory)
        numbered = failures(self.records)
        if not numbered or self.force:
            return None
        failure = Failure.model_validate(self.ledger.read(self.key, numbered[-1]).facts)
        if failure.problem == "key-mismatch" and failure.basis != self._accepted.basis(self.found.number):
            return None
        if not failure.final and len(numbered) < self.settings_of_run.max_attempts:
            return None
        self.teller.failed(self.key, failure)
        return self._failed(failure, len(numbered), "problem")

    @property
    def _directory(self) -> str:
        run = self.settings_of_run
        return join_url(run.publish, run.name, published_directory(self.key))

    @cached_property
    def _accepted(self) -> Accepted:
        """Whose keys an operator has accepted."""
        return accepted_keys(self.ledger) if self.settings_of_run.expectation == "previous" else Accepted()

    def _accept(self) -> None:
        if self.accept_keys:
            accept(self.ledger, self.key, self.found.number)

    # --- stages

    def _validate(self) -> None:
        if self._skips("validate"):
            self._accept()
            return
        run = self.settings_of_run
        basis = self._accepted.basis(self.found.number)
        contract = None
        if not self.accept_keys and self.key not in self._accepted:
            try:
                contract = self.workshop.expected(self.found.number)
            except SettingsError as error:
                self.teller.mistaken(str(error), self.found.name)
                raise
        waiting = self.found.progress == "committed"
        report, seconds = self._attempt(
            "validate",
            validate_step,
            self.url,
            parts=self._required_parts,
            contract=contract,
            scrub=run.scrub,
            copied=run.copied,
            ignore=run.ignore_keys,
            allow=run.allow_classes,
            # It is known to have come to rest, by clocks that validation alone does not look at.
            grace_seconds=run.grace_period if waiting else 0.0,
            newer_seconds=run.newer_tolerance,
            now=max(time.time(), self.found.survey.last_change or 0.0),
            options=run.options,
        )
        if report.state == "writing":
            raise _Changing
        try:
            require_unchanged(self.url, self.listing, run.options)
        except ChangedError:
            raise _Changing from None
        self.key = StepKey(self.found.name, report.fingerprint)
        self.records = self.ledger.stages(self.key)
        self.ledger.create(self.key, "seen", describe(self.found))
        if not report.ok:
            failure = failure_of_report(
                "validate",
                problem_of(report.state, report.findings),
                report.findings,
                f"it is {report.state}",
            )
            self._fail(failure.model_copy(update={"basis": basis}), seconds)
        self._accept()
        if self._skips("validate"):
            return
        if run.expectation == "previous":
            self._keep_contract()
        warnings = [f.model_dump(mode="json") for f in report.findings if f.severity == "warning"]
        facts = {
            "seconds": seconds,
            "warnings": len(warnings),
            "findings": warnings[:WARNINGS_KEPT],
            "stats": report.stats.model_dump(mode="json"),
            "expected": contract.source if contract else None,
            "norms": {} if report.tensors is None else norms_by_group(report.tensors),
        }
        self.tensors = report.tensors
        self._done("validate", facts, seconds)

    def _keep_contract(self) -> None:
        try:
            contract = step_contract(self.url, self.settings_of_run.options)
        except (CheckpointError, NotFoundError):
            # It validated a moment ago, so it is being written again or removed.
            raise _Changing from None
        keep_contract(self.ledger, self.key, contract)

    def _test_load(self) -> None:
        run = self.settings_of_run
        if self._skips("test-load"):
            return
        if not run.layouts:
            self._done("test-load", {"layouts": [], "seconds": 0.0}, 0.0)
            return
        report, seconds = self._attempt(
            "test-load",
            load_check_step,
            self.url,
            parts=self._parts,
            layouts=run.layouts,
            memory_budget=int(run.memory_budget),
            tp_rules=run.tp_rules,
            allow=run.allow_classes,
            options=run.options,
        )
        if not report.ok:
            bad = [layout for layout in report.layouts if not layout.ok]
            findings = [finding for layout in bad for finding in layout.findings]
            names = ", ".join(layout.layout for layout in bad)
            self._fail(
                self._unless_changed(
                    failure_of_report("test-load", "test-load", findings, f"it does not load on {names}")
                ),
                seconds,
            )
        layouts = [layout.model_dump(mode="json", exclude={"findings"}) for layout in report.layouts]
        self._done("test-load", {"layouts": layouts, "seconds": seconds}, seconds)

    def _export(self) -> list[Artifact]:
        run = self.settings_of_run
        store = open_store(self._directory, **run.publish_options)
        if "exported" in self.records:
            artifacts = artifacts_of(self.ledger, self.key)
            if artifacts_stand(store, artifacts):
                self.stages.append(StageOutcome(stage="export", outcome="skipped"))
                return artifacts
        elsewhere = self.workshop.elsewhere
        if elsewhere is not None:
            attempt = len(failures(self.records)) + 1
            report, seconds = self._attempt("export", elsewhere, self.key, attempt, self._parts)
        else:
            report, seconds = self._attempt(
                "export",
                export_step,
                self.url,
                self._directory,
                parts=self._parts,
                requests=[ExportRequest(**dict(export)) for export in run.exports],
                options=run.options,
                publish_options=run.publish_options,
            )
        self._done("export", facts_of(report, seconds), seconds)
        return report.artifacts

    def _publish(self, artifacts: list[Artifact]) -> PublishReport:
        run = self.settings_of_run
        warnings, timings = self._history(artifacts)
        page = publish_page(
            open_store(self._directory, **run.publish_options),
            self.url,
            self.key,
            warnings=warnings,
            tensors=self.tensors,
            artifacts=artifacts,
            timings=timings,
            layouts=run.layouts,
            options=run.options,
        )
        report, seconds = self._attempt(
            "publish",
            publish_step,
            self.url,
            run.publish,
            run=run.name,
            number=self.found.number,
            key=self.key,
            listing=self.listing,
            artifacts=artifacts,
            documents=[] if page is None else [page],
            warnings=warnings,
            timings=timings,
            options=run.options,
            publish_options=run.publish_options,
        )
        self.teller.recovered(self.key, report)
        facts = report.model_dump(mode="json", exclude={"first"}) | {"seconds": seconds}
        publication = publication_of(self.workshop, self.key, self.found.number, facts)
        announce(self.workshop, publication, self.key)
        self._done("publish", facts, seconds)
        return report

    def _history(self, artifacts: list[Artifact]) -> tuple[list[Finding], dict[str, float]]:
        """Warnings of validation and export, and seconds of the stages before publishing."""
        facts: dict[Stage, Mapping[str, Any]] = {}
        stage: Stage
        for stage in ("validate", "test-load"):
            facts[stage] = self.ledger.read(self.key, DONE[stage]).facts
        warnings = [Finding.model_validate(found) for found in facts["validate"].get("findings", ())]
        warnings += [found for artifact in artifacts for found in artifact.findings]
        timings: dict[str, float] = {
            stage: float(known.get("seconds", 0.0)) for stage, known in facts.items()
        }
        timings["export"] = round(sum(artifact.seconds for artifact in artifacts), 6)
        return warnings, timings

    @property
    def _required_parts(self) -> tuple[str, ...]:
        """What must have an index: the settings' parts, else those that the step has begun to have."""
        if self.settings_of_run.parts or self.found.survey.kind is not Kind.PARTS:
            return self.settings_of_run.parts
        begun = {name.partition("/")[0] for name in self.found.missing}
        return tuple(sorted({*self.found.survey.parts, *begun}))

    @property
    def _parts(self) -> tuple[str, ...]:
        """The checkpoints of this step, none if it is one itself."""
        return self.settings_of_run.parts or self.found.survey.parts

    # --- recording

    def _skips(self, stage: Stage) -> bool:
        if DONE[stage] not in self.records:
            return False
        self.stages.append(StageOutcome(stage=stage, outcome="skipped"))
        return True

    def _done(self, stage: Stage, facts: Mapping[str, Any], seconds: float) -> None:
        self.ledger.create(self.key, DONE[stage], facts)
        self.stages.append(StageOutcome(stage=stage, outcome="done", seconds=seconds))

    def _attempt(
        self, stage: Stage, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[R, float]:
        """Run a stage and return its report and seconds; a failure is recorded and ends the processing."""
        started = time.perf_counter()
        try:
            report = self.call(function, *args, **kwargs)
        except UsageError as error:
            # Nothing is wrong with the step, so nothing is recorded of it.
            mistake = self.workshop.mistaken(stage, self.found.name, error)
            self.teller.mistaken(str(mistake), self.found.name)
            raise mistake from None
        # Whatever a stage raises must be recorded: otherwise it would be tried for ever and nobody told.
        except Exception as error:
            self.unreachable = isinstance(error, StorageError) and not isinstance(error, NotFoundError)
            failure = failure_of_error(stage, error)
            if stage != "validate":
                failure = self._unless_changed(failure)
            self._fail(failure, round(time.perf_counter() - started, 6))
        return report, round(time.perf_counter() - started, 6)

    def _unless_changed(self, failure: Failure) -> Failure:
        """``failure``, or the one of a step that was saved over meanwhile, which explains any other."""
        if self.unreachable or failure.problem == "torn":
            return failure
        try:
            require_unchanged(self.url, self.listing, self.settings_of_run.options)
        except ChangedError as changed:
            return failure_of_error(failure.stage, changed)
        return failure

    def _fail(self, failure: Failure, seconds: float) -> NoReturn:
        number = self.ledger.fail(self.key, failure)
        self.stages.append(StageOutcome(stage=failure.stage, outcome="failed", seconds=seconds))
        raise _Stopped(failure, number)

    def _stopped(self, stopped: _Stopped) -> StepReport:
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
            after=self.after,
            alerts=self.teller.alerts,
            unreachable=self.unreachable,
        )


class _Changing(Exception):
    """The step is not at rest; a later pass will look again."""
