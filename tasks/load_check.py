"""The stage *test-load*: can other numbers of ranks load the step?

`load_check_step` runs `dcp.load.test_load` on each checkpoint of a step. torch is loaded here and nowhere
else in the lifecycle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dcp.findings import Finding, Report
from dcp.storage import join_url
from tasks.outcomes import boundary

if TYPE_CHECKING:
    from dcp.load import TestLoadReport


class LayoutOutcome(Report):
    """How one layout fared. ``part`` is the checkpoint's name within the step, empty if it is the step."""

    part: str
    layout: str
    ranks: int
    ok: bool
    bytes_needed: int
    bytes_read: int
    seconds: float
    findings: list[Finding]


class LoadCheckReport(Report):
    """All layouts of all checkpoints of a step."""

    ok: bool
    layouts: list[LayoutOutcome]


@boundary
def load_check_step(
    url: str,
    *,
    parts: Sequence[str],
    layouts: Sequence[str],
    memory_budget: int,
    tp_rules: str | None = None,
    allow: Sequence[str] = (),
    options: Mapping[str, Any],
    progress: Callable[[int, int], None] | None = None,
) -> LoadCheckReport:
    """Test-load a step.

    Args:
        url: the step's directory.
        parts: the checkpoints below it; empty if it is one itself.
        layouts: such as ``fsdp=2``.
        memory_budget: bytes that may be held.
        tp_rules: file of rules for the tp axis of layouts.
        allow: classes that objects may ask for beyond the built-in lists.
        options: fsspec options of the source.
        progress: told about bytes, anew for each checkpoint.

    Raises:
        CheckpointError: the step cannot be loaded at all.
        EnvironmentFault: storage or memory failed.
    """
    from dcp.load import test_load

    outcomes: list[LayoutOutcome] = []
    for part in parts or ("",):
        place = join_url(url, part) if part else url
        report = test_load(
            place,
            layouts=tuple(layouts),
            memory_budget=memory_budget,
            tp_rules=tp_rules,
            allow=allow,
            copied=True,  # The validation has judged times, by the run's own settings.
            progress=progress,
            **options,
        )
        outcomes += _outcomes(part, report)
    return LoadCheckReport(ok=all(outcome.ok for outcome in outcomes), layouts=outcomes)


def _outcomes(part: str, report: TestLoadReport) -> list[LayoutOutcome]:
    return [
        LayoutOutcome(
            part=part,
            layout=result.layout,
            ranks=result.ranks,
            ok=result.ok,
            bytes_needed=result.bytes_needed,
            bytes_read=result.bytes_read,
            seconds=result.seconds,
            findings=list(result.findings),
        )
        for result in report.layouts
    ]
