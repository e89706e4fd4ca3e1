"""Findings folded for people: one group a code, worst first, a few shown, the rest counted by where they are.

JSON output never passes through here; it holds every finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcp.findings import Finding

SHOWN = 5
_RANK = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True, slots=True)
class Group:
    """All findings of one code and severity."""

    severity: str
    code: str
    count: int
    shown: tuple[Finding, ...]
    """The first few, in the report's order."""
    where: str | None
    """For the others, the key prefix they share as ``model.layers.*``; None if they share none."""

    @property
    def hidden(self) -> int:
        """How many are not shown."""
        return self.count - len(self.shown)


def grouped(findings: Iterable[Finding], shown: int = SHOWN) -> list[Group]:
    """Group by severity and code, errors first, otherwise in the order of first appearance.

    Args:
        shown: the most findings of a group to show; one more is shown where only that one would be hidden.
    """
    by_code: dict[tuple[str, str], list[Finding]] = {}
    for found in findings:
        by_code.setdefault((found.severity, found.code), []).append(found)
    groups = []
    for (severity, code), members in sorted(by_code.items(), key=lambda item: _RANK[item[0][0]]):
        cut = len(members) if len(members) <= shown + 1 else shown
        groups.append(
            Group(
                severity=severity,
                code=code,
                count=len(members),
                shown=tuple(members[:cut]),
                where=shared_prefix([found.key or found.file or "" for found in members[cut:]]),
            )
        )
    return groups


def shared_prefix(names: Sequence[str]) -> str | None:
    """``model.layers.*`` for keys that all lie below `model.layers`; None where nothing is shared."""
    if not names:
        return None
    low, high = min(names).split("."), max(names).split(".")
    # What the first and last in order share, all between them share too.
    common = 0
    while common < min(len(low), len(high)) and low[common] == high[common]:
        common += 1
    if not common:
        return None
    if common == len(low) == len(high):
        return ".".join(low)
    return ".".join([*low[:common], "*"])
