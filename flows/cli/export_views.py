"""What a person sees of an export and of its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flows.cli.output import Cell, Output
from flows.cli.views import show_findings
from flows.text import human_bytes, human_seconds, name, plural

if TYPE_CHECKING:
    from dcp.exporting import ExportPlan, ExportReport


def show_plan(out: Output, plan: ExportPlan) -> None:
    """What it would take, and why it would be refused here."""
    measured = "measured before" if plan.rate_measured else "a guess"
    where = f"{plural(plan.ranges, 'record')} of {plural(plan.sources, 'file')}"
    out.facts(
        [
            ("checkpoint", name(plan.checkpoint)),
            ("destination", f"{name(plan.dest)} ({plan.format})"),
            ("keys", f"{plan.keys:,}, {plural(plan.tensors, 'tensor')} among them"),
            ("read", f"{human_bytes(plan.bytes)} in {where}"),
            ("disk", _of(plan.disk, plan.disk_free, "free")),
            ("memory", _of(plan.memory, plan.memory_available, "to be had")),
            (
                "time",
                f"about {human_seconds(plan.seconds)} at {human_bytes(plan.rate)}/s ({measured})",
            ),
            *(("refused", (why, "bad")) for why in plan.refusals),
        ]
    )
    out.line()
    out.table(
        ["FILE", "SIZE"],
        ([name(f.name), ("" if f.exact else "about ") + human_bytes(f.bytes)] for f in plan.files),
        right=["SIZE"],
    )


def _of(needed: int, there: int | None, word: str) -> Cell:
    if there is None:
        return human_bytes(needed)
    text = f"{human_bytes(needed)} of {human_bytes(there)} {word}"
    return text if needed <= there else (text, "bad")


def show_export(out: Output, report: ExportReport) -> None:
    """What was written, and what was left out."""
    rate = f", {human_bytes(report.bytes_written / report.seconds)}/s" if report.seconds else ""
    out.facts(
        [
            ("checkpoint", name(report.checkpoint)),
            ("destination", f"{name(report.dest)} ({report.format})"),
            ("tensors", f"{len(report.tensors):,}"),
            ("written", f"{human_bytes(report.bytes_written)} in {human_seconds(report.seconds)}{rate}"),
            ("memory", f"{human_bytes(report.peak_memory)} at most"),
        ]
    )
    out.line()
    out.table(
        ["FILE", "SIZE", "CRC-32C", "SHA-256"],
        ([name(f.name), human_bytes(f.size), f.crc32c, f.sha256 or "-"] for f in report.files),
        right=["SIZE"],
    )
    show_findings(out, report.findings, report.checkpoint)
