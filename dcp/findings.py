"""Findings and reports: what every check says, in one shape.

A `Finding` is one fact about a checkpoint under a stable code. `SEVERITY` is the one table of default
severities; `Code` is the closed set of codes. Reports are pydantic models whose JSON is what the
command prints; `ok` means no finding of severity ``error``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

Severity = Literal["error", "warning", "info"]
State = Literal["committed", "writing", "incomplete", "torn", "not-dcp"]

Code = Literal[
    "incomplete.no-metadata",
    "metadata.empty",
    "metadata.unreadable",
    "metadata.unsafe",
    "metadata.unsupported",
    "files.missing",
    "files.truncated",
    "files.unsafe-path",
    "files.newer-than-metadata",
    "files.orphan",
    "records.out-of-bounds",
    "records.overlap",
    "records.missing",
    "records.corrupt",
    "records.undecodable",
    "records.unsafe",
    "records.mismatch",
    "records.unchecked",
    "tiling.gap",
    "tiling.overlap",
    "tiling.out-of-bounds",
    "keys.missing",
    "keys.unexpected",
    "keys.renamed",
    "keys.shape",
    "keys.dtype",
    "keys.kind",
    "keys.ignored",
    "ranks.shared-value",
    "optim.incomplete",
    "values.nonfinite",
    "values.unchanged",
    "values.zero",
    "values.norm-jump",
    "export.dropped-empty",
    "export.unsafe-object",
    "export.skipped-object",
    "export.list-gap",
    "export.overflow",
    "manifest.damaged",
    "publish.foreign",
]
CODES: tuple[Code, ...] = get_args(Code)

SEVERITY: dict[Code, Severity] = {
    **dict.fromkeys(CODES, "error"),
    "files.orphan": "warning",
    "records.unchecked": "info",
    "keys.ignored": "info",
    "ranks.shared-value": "warning",
    "optim.incomplete": "warning",
    "values.nonfinite": "warning",
    "values.unchanged": "info",
    "values.zero": "warning",
    "values.norm-jump": "warning",
    "export.dropped-empty": "warning",
    "export.unsafe-object": "warning",
    "publish.foreign": "warning",
    "export.skipped-object": "warning",
    "export.list-gap": "warning",
    "export.overflow": "warning",
}


class Finding(BaseModel):
    """One fact. ``detail`` holds JSON values: byte offsets and lengths, expected and actual."""

    model_config = ConfigDict(frozen=True)

    code: Code
    severity: Severity
    key: str | None = None
    file: str | None = None
    message: str
    detail: dict[str, Any] = Field(default_factory=dict)

    def inside(self, part: str) -> Finding:
        """The same of a part of a step: its names begin with the part's."""
        return self.model_copy(
            update={
                "key": None if self.key is None else f"{part}/{self.key}",
                "file": None if self.file is None else f"{part}/{self.file}",
                "message": f"{part}: {self.message}",
            }
        )


def finding(
    code: Code,
    message: str,
    *,
    key: str | None = None,
    file: str | None = None,
    severity: Severity | None = None,
    facts: Mapping[str, object] | None = None,
    **detail: object,
) -> Finding:
    """A `Finding` with the code's default severity unless one is given; ``facts`` join its detail."""
    return Finding(
        code=code,
        severity=severity or SEVERITY[code],
        key=key,
        file=file,
        message=message,
        detail={**(facts or {}), **detail},
    )


def has_errors(findings: Iterable[Finding]) -> bool:
    """Whether any finding is an error."""
    return any(found.severity == "error" for found in findings)


def errors_of(findings: Iterable[Finding]) -> Iterator[Finding]:
    """The findings of severity ``error``, in order."""
    return (found for found in findings if found.severity == "error")


class Report(BaseModel):
    """Base of all reports: extra fields are a programming error."""

    model_config = ConfigDict(extra="forbid")
