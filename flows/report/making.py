"""From a checkpoint or a settings file to a written report."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dcp.storage import home_expanded
from flows.report.checkpoint import gather_checkpoint
from flows.report.checkpoint_page import render_checkpoint, verdict_of
from flows.report.run_page import Link, render_runs
from flows.report.run_page import verdict_of as verdict_of_run
from flows.report.runs import StepFact, gather_runs
from flows.report.saving import PAGE, SavedReport, default_name, save
from flows.settings import LifecycleSettings


def report_checkpoint(
    url: str, output: str | None, *, validation: Mapping[str, Any] | None = None
) -> SavedReport:
    """Look at a checkpoint and write its page.

    Args:
        url: the checkpoint.
        output: file to write, a path or URL; by default a name of its own in the working directory.
        validation: arguments of `dcp.validation.validate`.

    Raises:
        UsageError: ``output`` names a directory, or the contract is wrong.
        StorageError: storage failed; nothing half-written is visible.
    """
    started = time.perf_counter()
    facts = gather_checkpoint(url, **(validation or {}))
    page = render_checkpoint(facts)
    place = save(page, output or default_name(facts.name))
    return SavedReport(
        report=place,
        subject=facts.url,
        kind="checkpoint",
        verdict=verdict_of(facts).word,
        ok=facts.ok,
        errors=facts.errors,
        warnings=facts.warnings,
        bytes=len(page.encode()),
        seconds=round(time.perf_counter() - started, 6),
    )


def report_runs(settings: LifecycleSettings, run: str | None, output: str | None) -> SavedReport:
    """Look at all runs of the settings, or at one, and write their page.

    Args:
        settings: the runs.
        run: only the run of this name.
        output: file to write, a path or URL; by default a name of its own in the working directory.

    Raises:
        UsageError: there is no such run, or ``output`` names a directory.
        StorageError: the page cannot be written.
    """
    started = time.perf_counter()
    facts = gather_runs(settings, run)
    title = facts.runs[0].name if len(facts.runs) == 1 else settings.file.stem
    target = output or default_name(title)
    page = render_runs(facts, link_from(target))
    place = save(page, target)
    verdicts = [verdict_of_run(each) for each in facts.runs]
    return SavedReport(
        report=place,
        subject=str(settings.file),
        kind="runs",
        verdict=", ".join(dict.fromkeys(verdict.word for verdict in verdicts)),
        ok=not any(each.error for each in facts.runs),
        errors=sum(len(each.wrong) for each in facts.runs),
        warnings=sum(step.warnings for each in facts.runs for step in each.steps),
        bytes=len(page.encode()),
        seconds=round(time.perf_counter() - started, 6),
    )


def link_from(output: str) -> Link:
    """How a page at ``output`` leads to those beside published steps, where both are local files."""
    here = None if "://" in output else home_expanded(output).absolute().parent

    def link(step: StepFact) -> str | None:
        page = published_page(step)
        return None if here is None or page is None else quote(os.path.relpath(page, here))

    return link


def published_page(step: StepFact) -> Path | None:
    """The page beside a published step, if it is a local file that exists."""
    if step.published is None or "://" in step.published:
        return None
    page = Path(step.published) / PAGE
    return page if page.is_file() else None


def pages_for(output: Path) -> dict[str, bytes]:
    """A local page and those that it leads to, by the path under which it names them, for `serving`."""
    text = output.read_text(encoding="utf-8")
    found = {output.name: text.encode()}
    for href in re.findall(r'<a href="([^"#:?]+report\.html)">', text):
        page = Path(os.path.normpath(output.parent / href))
        if page.is_file() and not href.startswith(".."):
            found[href] = page.read_bytes()
    return found
