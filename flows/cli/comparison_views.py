"""What a person sees of a comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flows.cli.output import Output
from flows.cli.views import show_findings
from flows.text import name, plural

if TYPE_CHECKING:
    from dcp.comparison import DiffReport, KeyChange, ValueChange

_MOST = 20
"""Keys shown of each kind of difference; JSON has them all."""


def show_diff(out: Output, report: DiffReport) -> None:
    """The verdict, then each kind of difference."""
    how = (
        "keys, shapes and types"
        if report.values is None
        else f"keys, shapes and types, and {plural(report.compared, 'key')} by value"
    )
    out.facts(
        [
            ("a", name(report.a)),
            ("b", name(report.b)),
            ("verdict", ("the same", "good") if report.same else ("different", "bad")),
            ("compared", how),
            ("chunked differently", plural(len(report.chunking), "key")),
        ]
    )
    _section(out, "only in a", [name(key) for key in report.only_a])
    _section(out, "only in b", [name(key) for key in report.only_b])
    _section(out, "described differently", [_described(change) for change in report.changed])
    _section(out, "different values", [_valued(change) for change in report.values or ()])
    show_findings(out, report.findings, report.a)


def _section(out: Output, title: str, lines: list[str]) -> None:
    if not lines:
        return
    out.line()
    out.line(f"{title} ({len(lines):,})", "title")
    for text in lines[:_MOST]:
        out.line(f"  {text}")
    if len(lines) > _MOST:
        out.line(f"  … and {len(lines) - _MOST:,} more", "dim")


def _described(change: KeyChange) -> str:
    words = [
        f"{what} {before} -> {after}"
        for what, pair in (("kind", change.kind), ("shape", change.shape), ("type", change.dtype))
        if pair is not None
        for before, after in [pair]
    ]
    return f"{name(change.key)}: {', '.join(words)}"


def _valued(change: ValueChange) -> str:
    if change.elements is None:
        return f"{name(change.key)}: another object"
    text = f"{name(change.key)}: {change.different:,} of {change.elements:,} elements"
    if change.largest is not None:
        text += f", by at most {change.largest:.6g}"
    if change.norm is not None:
        text += f", norm {change.norm[0]:.6g} -> {change.norm[1]:.6g}"
    return text
