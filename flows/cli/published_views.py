"""What a person sees of published steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flows.cli.output import Output
from flows.cli.text import human_bytes, human_seconds, name

if TYPE_CHECKING:
    from tasks.verify import VerifyReport


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
