"""What Prefect's UI shows of a stage: pages in Markdown and the rows of the table of findings.

Pure text. Names from a bucket stand in code spans (`code`), where Markdown leaves them alone, after `inert`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

from dcp.advice import advice_for
from dcp.findings import Finding
from dcp.validation import ValidationReport
from flows.grouping import grouped
from flows.text import anchored, human_bytes, human_seconds, inert, plural
from tasks.export import StepExport
from tasks.load_check import LoadCheckReport
from tasks.publish import PublishReport

ROWS = 200
"""Most findings in a table."""

_LONGEST = 300
_WIDEST = 100
_CELL = 60


def code(text: str, limit: int = _LONGEST) -> str:
    """A code span that shows ``text`` whatever it is; what is too long for a line loses its middle."""
    words = inert(text, limit).split(" ")
    shown = " ".join(word if len(word) <= _WIDEST else inert(word, _WIDEST) for word in words)
    fence = "`" * (max((len(run) for run in re.findall("`+", shown)), default=0) + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") or not shown.strip() else ""
    return f"{fence}{pad}{anchored(shown)}{pad}{fence}"


def plain_name(text: str) -> str:
    """A name for where Markdown is read but code spans are not shown."""
    return re.sub(r"[^\w./:-]", "\N{REPLACEMENT CHARACTER}", text)[:_LONGEST]


def browser_address(url: str) -> str | None:
    """Where a browser finds an object: for buckets the provider's own page; None where there is none."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return Path(url).absolute().as_uri()
    bucket, _, key = rest.partition("/")
    match scheme:
        case "gs" | "gcs":
            return f"https://storage.cloud.google.com/{quote(bucket)}/{quote(key)}"
        case "s3" | "s3a":
            return f"https://s3.console.aws.amazon.com/s3/object/{quote(bucket)}?prefix={quote(key)}"
        case "file":
            return f"file://{quote(rest)}"
        case "http" | "https":
            return url
    return None


def validation_page(title: str, report: ValidationReport) -> str:
    """The verdict, what was checked, what is wrong, what to do."""
    stats = report.stats
    checked = (
        f"{plural(stats.keys, 'key')}, {plural(stats.chunks, 'chunk')}, {plural(stats.files, 'file')}, "
        f"{human_bytes(stats.bytes)} in {human_seconds(stats.seconds)}"
    )
    return _page(
        title,
        f"{report.state}, {'ok' if report.ok else 'not ok'}",
        [
            ("Checkpoint", code(report.checkpoint)),
            ("Fingerprint", code(report.fingerprint)),
            ("Checked", checked),
            ("Every byte read", "no" if report.tensors is None else "yes"),
        ],
        findings=report.findings,
        url=report.checkpoint,
    )


def load_page(title: str, report: LoadCheckReport, url: str) -> str:
    """One row a layout, then what was wrong."""
    rows = [
        [
            code(f"{layout.part} {layout.layout}".strip()),
            f"{layout.ranks:,}",
            "ok" if layout.ok else "**not ok**",
            human_bytes(layout.bytes_needed),
            human_bytes(layout.bytes_read),
            human_seconds(layout.seconds),
        ]
        for layout in report.layouts
    ]
    return _page(
        title,
        "loads" if report.ok else "does not load",
        [("Checkpoint", code(url))],
        table=_table(["Layout", "Ranks", "State", "Needed", "Read", "Time"], rows),
        findings=[found for layout in report.layouts for found in layout.findings],
        url=url,
    )


def export_page(title: str, report: StepExport, url: str) -> str:
    """One row an artifact."""
    rows = [
        [
            code(artifact.name),
            artifact.format,
            f"{len(artifact.tensors):,}",
            f"{len(artifact.files):,}",
            human_bytes(sum(file.size for file in artifact.files)),
            human_seconds(artifact.seconds),
            human_bytes(artifact.peak_memory),
        ]
        for artifact in report.artifacts
    ]
    return _page(
        title,
        "exported",
        [("Checkpoint", code(url))],
        table=_table(["Artifact", "Format", "Tensors", "Files", "Size", "Time", "Memory"], rows),
        findings=[found for artifact in report.artifacts for found in artifact.findings],
        url=url,
    )


def publication_page(title: str, report: PublishReport) -> str:
    """Where it is, how to check it."""
    return _page(
        title,
        "published",
        [
            ("Place", code(report.url)),
            ("Manifest", code(report.manifest)),
            ("Fingerprint", code(report.fingerprint)),
            ("Size", f"{human_bytes(report.bytes)} in {plural(report.files, 'file')}"),
            ("latest leads to", code(report.alias)),
        ],
        command=f"ckpt verify {shlex.quote(report.url)}",
    )


def failure_page(title: str, error: Exception, findings: Sequence[Finding], url: str) -> str:
    """Why a stage could not do its work."""
    facts = [("Checkpoint", code(url)), ("Why", code(str(error) or type(error).__name__, 1000))]
    advice = "" if findings else advice_for(error, url=shlex.quote(url))
    return _page(title, "failed", facts, findings=findings, url=url, advice=advice)


def finding_rows(findings: Iterable[Finding]) -> list[dict[str, str]]:
    """Rows for Prefect's table: errors first, no more than `ROWS` and a last one that counts the others."""
    order = {"error": 0, "warning": 1, "info": 2}
    ordered = sorted(findings, key=lambda found: order[found.severity])
    rows = [
        {
            "severity": found.severity,
            "code": found.code,
            "key": "" if found.key is None else code(found.key, _CELL),
            "file": "" if found.file is None else code(found.file, _CELL),
            "message": code(found.message),
        }
        for found in ordered[:ROWS]
    ]
    if len(ordered) > ROWS:
        more = f"and {len(ordered) - ROWS:,} more"
        rows.append({"severity": "", "code": "", "key": "", "file": "", "message": more})
    return rows


def count(findings: Iterable[Finding]) -> str:
    """``2 errors, 1 warning``, or ``no findings``."""
    told = list(findings)
    numbers = [
        (severity, sum(found.severity == severity for found in told)) for severity in ("error", "warning")
    ]
    others = len(told) - sum(number for _, number in numbers)
    said = [plural(number, severity) for severity, number in numbers if number]
    said += [plural(others, "note")] if others else []
    return ", ".join(said) or "no findings"


def _page(
    title: str,
    verdict: str,
    facts: Sequence[tuple[str, str]],
    *,
    table: str = "",
    findings: Sequence[Finding] = (),
    url: str = "URL",
    command: str = "",
    advice: str = "",
) -> str:
    lines = [f"# {title}", "", f"**{verdict}**", "", _facts(facts)]
    lines += ["", table] if table else []
    if findings:
        lines += ["", f"## Findings: {count(findings)}", ""]
    for group in grouped(findings):
        lines.append(f"- **{group.severity}** {code(group.code)} ({group.count:,})")
        lines += [f"    - {_said(one)}" for one in group.shown]
        if group.hidden:
            where = f" in {code(group.where)}" if group.where else ""
            lines.append(f"    - … and {group.hidden:,} more{where}")
    codes = dict.fromkeys(found.code for found in findings if found.severity == "error")
    todo = [advice] if advice else []
    todo += dict.fromkeys(advice_for(each, url=shlex.quote(url)) for each in codes)
    if todo or command:
        lines += ["", "## Next", ""]
        lines += [f"- {_advised(text)}" for text in todo[:3]]
        lines += [f"- {code(command, 1000)}"] if command else []
    return "\n".join(lines) + "\n"


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    """A table whose head is the first of them; one alone, which would be no table, as a line."""
    return _table(facts[0], facts[1:]) if len(facts) > 1 else f"{facts[0][0]}: {facts[0][1]}"


def _said(found: Finding) -> str:
    place = found.key if found.key is not None else found.file
    if place is None or place in found.message:
        return code(found.message)
    return f"{code(place)}: {code(found.message)}"


def _advised(text: str) -> str:
    """Advice, with the command in it as code."""
    before, marker, command = text.partition("ckpt ")
    if not marker or "(" in before.rpartition(" ")[2] or before.endswith("("):
        return code(text, 1000)
    return f"{before}{code(f'ckpt {command}', 1000)}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head, *body = [f"| {' | '.join(_cell(each) for each in row)} |" for row in (columns, *rows)]
    return "\n".join([head, f"|{' --- |' * len(columns)}", *body])


def _cell(text: str) -> str:
    """Also within a code span, a bar would end the cell."""
    return text.replace("|", "\\|")
