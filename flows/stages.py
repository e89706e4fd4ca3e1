"""The stages of a step, one after another: what each is called with, and what is kept of its report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from dcp.checkpoint import Kind
from dcp.contract import Contract
from dcp.errors import ChangedError, CheckpointError, NotFoundError, SettingsError
from dcp.findings import Finding
from dcp.storage import open_store
from flows.following import announce, publication_of
from flows.report.health import norms_by_group
from flows.report.publication import publish_page
from flows.step_work import Changing, StepWork
from flows.workshop import StageOutcome
from tasks.acceptance import Accepted, accept, accepted_keys
from tasks.discover import (
    describe,
)
from tasks.export import ExportRequest, artifacts_stand, export_step
from tasks.handover import artifacts_of, facts_of
from tasks.ledger import DONE, Stage, StepKey, failures
from tasks.load_check import load_check_step
from tasks.manifest import Artifact
from tasks.outcomes import failure_of_report, problem_of
from tasks.partial import RECORD as PARTIAL
from tasks.partial import shortfalls
from tasks.publish import PublishReport, publish_step, require_unchanged
from tasks.text import plain
from tasks.validate import keep_contract, step_contract, validate_step

WARNINGS_KEPT = 200


class Stages(StepWork):
    """What `flows.lifecycle` calls in turn."""

    @cached_property
    def accepted(self) -> Accepted:
        """Whose keys an operator has accepted."""
        return accepted_keys(self.ledger) if self.settings_of_run.expectation == "previous" else Accepted()

    def accept(self) -> None:
        """Record that its keys are meant, if somebody says so."""
        if self.accept_keys:
            accept(self.ledger, self.key, self.found.number)

    def validate(self) -> None:
        """Validate the step, and from then on know it by the fingerprint of its bytes."""
        if self.skips("validate"):
            self.accept()
            return
        run = self.settings_of_run
        basis = self.accepted.basis(self.found.number)
        contract = None
        if not self.accept_keys and self.key not in self.accepted:
            try:
                contract = self.workshop.expected(self.found.number)
            except SettingsError as error:
                self.teller.mistaken(str(error), self.found.name)
                raise
        waiting = self.found.progress == "committed"
        report, seconds = self.attempt(
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
            raise Changing
        try:
            require_unchanged(self.url, self.listing, run.options)
        except ChangedError:
            raise Changing from None
        self.key = StepKey(self.found.name, report.fingerprint)
        self.records = self.ledger.stages(self.key)
        self.ledger.create(self.key, "seen", describe(self.found))
        if not report.ok:
            judged = {"basis": basis, "expected": self._expected_step(contract)}
            failure = failure_of_report(
                "validate",
                problem_of(report.state, report.findings),
                report.findings,
                f"it is {report.state}",
            )
            self.fail(failure.model_copy(update=judged), seconds)
        self.accept()
        if self.skips("validate"):
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
        self.done("validate", facts, seconds)

    def _expected_step(self, contract: Contract | None) -> str:
        """URL of the step whose keys were expected, if it was one."""
        if contract is None or self.settings_of_run.expectation != "previous":
            return ""
        return contract.source or ""

    def _keep_contract(self) -> None:
        try:
            contract = step_contract(self.url, self.settings_of_run.options)
        except (CheckpointError, NotFoundError):
            # It validated a moment ago, so it is being written again or removed.
            raise Changing from None
        keep_contract(self.ledger, self.key, contract)

    def test_load(self) -> None:
        """Test-load it on the layouts of the settings."""
        run = self.settings_of_run
        if self.skips("test-load"):
            return
        if not run.layouts:
            self.done("test-load", {"layouts": [], "seconds": 0.0}, 0.0)
            return
        report, seconds = self.attempt(
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
            self.fail(
                self.unless_changed(
                    failure_of_report("test-load", "test-load", findings, f"it does not load on {names}")
                ),
                seconds,
            )
        layouts = [layout.model_dump(mode="json", exclude={"findings"}) for layout in report.layouts]
        self.done("test-load", {"layouts": layouts, "seconds": seconds}, seconds)

    def export(self) -> list[Artifact]:
        """Export it to where it will be published, here or on another worker."""
        run = self.settings_of_run
        store = open_store(self.directory, **run.publish_options)
        if "exported" in self.records:
            artifacts = artifacts_of(self.ledger, self.key)
            if artifacts_stand(store, artifacts):
                self.stages.append(StageOutcome(stage="export", outcome="skipped"))
                return artifacts
        elsewhere = self.workshop.elsewhere
        if elsewhere is not None:
            attempt = len(failures(self.records)) + 1
            report, seconds = self.attempt("export", elsewhere, self.key, attempt, self._parts)
        else:
            report, seconds = self.attempt(
                "export",
                export_step,
                self.url,
                self.directory,
                parts=self._parts,
                requests=[ExportRequest(**dict(export)) for export in run.exports],
                options=run.options,
                publish_options=run.publish_options,
            )
        self.done("export", facts_of(report, seconds), seconds)
        return report.artifacts

    def publish(self, artifacts: list[Artifact]) -> PublishReport:
        run = self.settings_of_run
        warnings, timings = self._history(artifacts)
        lacking = shortfalls(artifacts)
        if lacking:
            self.partial = "; ".join(shortfall.text for shortfall in lacking)
            self.ledger.create(self.key, PARTIAL, {"message": plain(self.partial)})
        page = publish_page(
            open_store(self.directory, **run.publish_options),
            self.url,
            self.key,
            wanted=run.report,
            warnings=warnings,
            tensors=self.tensors,
            artifacts=artifacts,
            timings=timings,
            layouts=run.layouts,
            options=run.options,
        )
        report, seconds = self.attempt(
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
        if lacking:
            self.teller.partial(lacking, report)
        facts = report.model_dump(mode="json", exclude={"first"}) | {"seconds": seconds}
        publication = publication_of(self.workshop, self.key, self.found.number, facts)
        announce(self.workshop, publication, self.key)
        self.done("publish", facts, seconds)
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
