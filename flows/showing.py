"""The `Call` of `process-checkpoint` that shows what came of each stage, as artifacts of the flow run.

For a run of the settings there are six keys, each with a step's page after the other: ``RUN-validate``,
``RUN-test-load``, ``RUN-export``, ``RUN-publish``, ``RUN-findings`` and ``RUN-report``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from dcp.errors import CheckpointError, NotLoadableError
from dcp.findings import Finding
from dcp.storage import join_url
from dcp.validation import ValidationReport
from flows import artifact_pages as pages
from flows.report.saving import PAGE
from flows.workshop import Call, StepReport
from tasks.artifacts import Artifacts, artifact_key
from tasks.export import StepExport, export_step
from tasks.ledger import Stage
from tasks.load_check import LoadCheckReport, load_check_step
from tasks.publish import PublishReport, publish_step
from tasks.validate import validate_step

P = ParamSpec("P")
R = TypeVar("R")

_STAGES: dict[Callable[..., Any], Stage] = {
    validate_step: "validate",
    load_check_step: "test-load",
    export_step: "export",
    publish_step: "publish",
}


class Showing:
    """Runs stages through another `Call` and shows what they report."""

    def __init__(self, artifacts: Artifacts, run: str, step: str, url: str, call: Call) -> None:
        """``url`` is the step's."""
        self._artifacts = artifacts
        self._run = run
        self._step = step
        self._name = pages.plain_name(step)
        self._url = url
        self._call = call
        self._findings: list[Finding] = []
        self._judged = False

    def __call__(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            report = self._call(function, *args, **kwargs)
        except Exception as error:
            # Where it is none of the four, it is an export on another worker.
            self._failed(_STAGES.get(function, "export"), error)
            raise
        self._done(report)
        return report

    def finish(self, report: StepReport) -> None:
        """Show all findings in one table, and where the page of the published step is."""
        if self._judged:
            rows = pages.finding_rows(self._findings)
            said = f"{self._name}: {pages.count(self._findings)}"
            if rows:
                self._artifacts.table(artifact_key(self._run, "findings"), rows, said)
            else:
                self._artifacts.markdown(artifact_key(self._run, "findings"), "No findings.\n", said)
        newly = any(each.stage == "publish" and each.outcome == "done" for each in report.stages)
        if report.published and newly:
            page = join_url(report.published, PAGE)
            address = pages.browser_address(page)
            if address is not None:
                self._artifacts.link(
                    artifact_key(self._run, "report"),
                    address,
                    pages.plain_name(page),
                    f"{self._name}: report",
                )

    def _done(self, report: object) -> None:
        if isinstance(report, ValidationReport):
            self._found(report.findings)
            verdict = f"{report.state}, {pages.count(report.findings)}"
            self._show("validate", pages.validation_page(self._title("validate"), report), verdict)
        elif isinstance(report, LoadCheckReport):
            self._found([found for layout in report.layouts for found in layout.findings])
            verdict = "loads" if report.ok else "does not load"
            self._show("test-load", pages.load_page(self._title("test-load"), report, self._url), verdict)
        elif isinstance(report, StepExport):
            self._found([found for artifact in report.artifacts for found in artifact.findings])
            page = pages.export_page(self._title("export"), report, self._url)
            self._show("export", page, pages.plural(len(report.artifacts), "artifact"))
        elif isinstance(report, PublishReport):
            page = pages.publication_page(self._title("publish"), report)
            self._show("publish", page, "published")

    def _failed(self, stage: Stage, error: Exception) -> None:
        findings: tuple[Finding, ...] = ()
        if isinstance(error, NotLoadableError):
            findings = error.findings
        elif isinstance(error, CheckpointError):
            findings = (error.as_finding(),)
        self._found(findings)
        page = pages.failure_page(self._title(stage), error, findings, self._url)
        self._show(stage, page, "failed")

    def _found(self, findings: list[Finding] | tuple[Finding, ...]) -> None:
        self._judged = True
        self._findings += findings

    def _show(self, stage: Stage, page: str, verdict: str) -> None:
        self._artifacts.markdown(artifact_key(self._run, stage), page, f"{self._name}: {verdict}")

    def _title(self, stage: Stage) -> str:
        return f"{stage} {pages.code(self._step)}"
