"""What a person sees of published steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flows.cli.output import Output
from flows.text import human_bytes, human_seconds, name

if TYPE_CHECKING:
    from tasks.aliases import AliasRecord
    from tasks.publish import PublishReport
    from tasks.verify import VerifyReport


def show_publication(out: Output, report: PublishReport, alias: str | None) -> None:
    """Where it is published."""
    out.facts(
        [
            ("published", name(report.url)),
            ("fingerprint", report.fingerprint),
            ("files", f"{report.files:,}, {human_bytes(report.bytes)}"),
            ("latest", name(report.alias)),
        ]
    )
    if alias is not None:
        out.line(f"{name(alias)} leads to it")
    for said in report.findings:
        out.line(f"{said.severity}: {name(said.message)}")
    if not report.first:
        out.line("It was published before; nothing changed.")


def show_alias(out: Output, record: AliasRecord) -> None:
    """Where an alias leads now."""
    out.line(f"{name(record.alias)} leads to {name(record.run)}/{name(record.manifest)}")


def show_verification(out: Output, report: VerifyReport) -> None:
    """The verdict, then every file with what is wrong with it."""
    out.facts(
        [
            ("published", name(report.url)),
            ("step", f"{name(report.run or '?')} {name(report.step or '?')}"),
            ("fingerprint", report.fingerprint or "?"),
            ("verdict", ("ok" if report.ok else "not ok", "good" if report.ok else "bad")),
            ("checked", f"{report.message}, {human_bytes(report.bytes)} in {human_seconds(report.seconds)}"),
        ]
    )
    if report.files:
        out.line()
        out.table(
            ["FILE", "SIZE", "STATE"],
            (
                [
                    name(file.name),
                    human_bytes(file.size),
                    (f"{file.problem}: {file.message}", "bad") if file.problem else ("ok", "good"),
                ]
                for file in report.files
            ),
            right=["SIZE"],
        )
    for said in report.contradictions:
        out.line(f"the manifest cannot be right: {name(said)}")
    for said in report.unproven:
        out.line(f"not proven: {name(said)}")
    if report.wrong_tensors:
        out.line()
        out.table(
            ["TENSOR", "ARTIFACT", "PROBLEM"],
            ([name(t.name), name(t.artifact), (name(t.message), "bad")] for t in report.wrong_tensors),
        )
