"""What a person sees of an import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flows.cli.output import Output
from flows.text import human_bytes, human_seconds, name, plural

if TYPE_CHECKING:
    from dcp.save import ImportReport


def show_import(out: Output, report: ImportReport) -> None:
    """What was written, and what found no place."""
    rate = f", {human_bytes(report.bytes_written / report.seconds)}/s" if report.seconds else ""
    out.facts(
        [
            ("file", name(report.source)),
            ("checkpoint", name(report.checkpoint)),
            ("ranks", f"{report.ranks:,}, {plural(len(report.files), 'file')}"),
            ("keys", f"{report.keys:,}, {plural(report.tensors, 'tensor')} among them"),
            ("written", f"{human_bytes(report.bytes_written)} in {human_seconds(report.seconds)}{rate}"),
        ]
    )
    if report.dropped:
        out.line(f"left out, being empty: {', '.join(map(name, report.dropped[:10]))}", "dim")
