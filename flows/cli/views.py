"""What a person sees of each report. JSON output never passes through here."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from dcp.advice import advice_for
from flows.cli.output import Output
from flows.text import human_bytes, human_seconds, name, plural

if TYPE_CHECKING:
    from dcp.findings import Finding
    from dcp.inspection import InspectReport
    from dcp.load import TestLoadReport
    from dcp.validation import ValidationReport

_MOST_ADVICE = 3
_ROOM_FOR_KEYS = 60
_LONGEST_KEY = 200
_STATES = {"committed": "good", "writing": "warning", "incomplete": "bad", "torn": "bad", "not-dcp": "bad"}


def show_inspection(out: Output, report: InspectReport) -> None:
    """Totals, then files, then keys."""
    totals = report.totals
    out.facts(
        [
            ("checkpoint", name(report.checkpoint)),
            ("producer", report.producer + (f", format {report.version}" if report.version else "")),
            ("written by", plural(totals.ranks, "rank")),
            ("fingerprint", report.fingerprint),
            (
                "keys",
                f"{totals.keys:,}: {plural(totals.tensors, 'tensor')} in {plural(totals.chunks, 'chunk')}, "
                f"{plural(totals.objects, 'object')}, {human_bytes(totals.bytes)}",
            ),
            ("files", f"{totals.files:,}, {human_bytes(totals.file_bytes)}"),
        ]
    )
    out.line()
    out.table(
        ["FILE", "SIZE", "RECORDS"],
        ([name(file.name), human_bytes(file.bytes), f"{file.records:,}"] for file in report.files),
        right=["SIZE", "RECORDS"],
    )
    out.line()
    longest = _key_width([info.key for info in report.keys])
    out.table(
        ["KEY", "TYPE", "SHAPE", "CHUNKS", "SIZE"],
        (
            [
                name(info.key, longest),
                info.dtype or "object",
                "" if info.shape is None else f"[{', '.join(map(str, info.shape))}]",
                f"{info.chunks:,}",
                human_bytes(info.bytes),
            ]
            for info in report.keys
        ),
        right=["CHUNKS", "SIZE"],
    )


def _key_width(keys: Sequence[str]) -> int:
    """The most characters of a key to show: a few very long ones must not push the table apart for all."""
    lengths = sorted(map(len, keys))
    usual = lengths[len(lengths) * 9 // 10] if lengths else 0
    return min(_LONGEST_KEY, max(_ROOM_FOR_KEYS, usual * 3 // 2))


def show_validation(out: Output, report: ValidationReport) -> None:
    """The verdict first, then findings and what to do."""
    stats = report.stats
    verdict = "ok" if report.ok else "not ok"
    out.facts(
        [
            ("checkpoint", name(report.checkpoint)),
            ("state", (f"{report.state}, {verdict}", _STATES[report.state] if report.ok else "bad")),
            ("fingerprint", report.fingerprint),
            (
                "checked",
                f"{plural(stats.keys, 'key')}, {plural(stats.chunks, 'chunk')}, "
                f"{plural(stats.files, 'file')}, {human_bytes(stats.bytes)} "
                f"in {human_seconds(stats.seconds)}",
            ),
        ]
    )
    show_findings(out, report.findings, report.checkpoint)


def show_test_load(out: Output, report: TestLoadReport) -> None:
    """One row a layout, then what was wrong."""
    out.facts(
        [
            ("checkpoint", name(report.checkpoint)),
            ("verdict", ("ok" if report.ok else "not ok", "good" if report.ok else "bad")),
            ("read", f"{human_bytes(report.bytes_read)} in {human_seconds(report.seconds)}"),
        ]
    )
    if report.tp_rules_idle:
        out.facts([("unused tp rules", ", ".join(map(name, report.tp_rules_idle)))])
    out.line()
    parts = ["PART"] if any(result.part for result in report.layouts) else []
    out.table(
        [*parts, "LAYOUT", "RANKS", "STATE", "TENSORS", "OBJECTS", "NEEDED", "READ", "TIME"],
        (
            [
                *([name(result.part)] if parts else []),
                name(result.layout),
                f"{result.ranks:,}",
                ("ok", "good") if result.ok else ("not ok", "bad"),
                f"{result.tensors:,}",
                f"{result.objects + result.objects_scanned:,}",
                human_bytes(result.bytes_needed),
                human_bytes(result.bytes_read),
                human_seconds(result.seconds),
            ]
            for result in report.layouts
        ),
        right=["RANKS", "TENSORS", "OBJECTS", "NEEDED", "READ", "TIME"],
    )
    show_findings(out, findings_of(report), report.checkpoint)


def findings_of(report: TestLoadReport) -> list[Finding]:
    """What was found on any layout, once."""
    findings = {
        (found.code, found.key, found.file, found.message): found
        for result in report.layouts
        for found in result.findings
    }
    return list(findings.values())


def show_findings(out: Output, findings: Iterable[Finding], url: str) -> None:
    """Findings, and the advice for the errors among them."""
    found = list(findings)
    if not found:
        return
    out.line()
    out.findings(found)
    codes = dict.fromkeys(one.code for one in found if one.severity == "error")
    advice = dict.fromkeys(advice_for(code, url=shlex.quote(url)) for code in codes)
    if advice:
        out.line()
        for text in list(advice)[:_MOST_ADVICE]:
            out.line(f"→ {text}")
