"""Findings as a page tells them: grouped, worst first, each group with what to do about it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from dcp.advice import advice_for
from dcp.findings import Finding, Severity
from flows.grouping import grouped
from flows.text import name

SHOWN = 20
"""Findings of a group that are spelled out."""
LONGEST_KEY = 1000
"""Characters of a key by which the page's script finds it again."""
_LONGEST = 600


@dataclass(frozen=True, slots=True)
class Said:
    """One finding. ``key`` is set where the page can show the tensor."""

    key: str | None
    place: str
    message: str


@dataclass(frozen=True, slots=True)
class Problem:
    """All findings of one code and severity."""

    severity: str
    code: str
    count: int
    said: tuple[Said, ...]
    hidden: int
    """How many are only counted."""
    where: str
    """What the counted ones share, as ``model.layers.*``; empty if nothing."""
    advice: str


def problems_of(findings: Iterable[Finding], url: str) -> tuple[Problem, ...]:
    """Group findings about the checkpoint at ``url``."""
    place = shlex.quote(name(url))
    return tuple(
        Problem(
            severity=group.severity,
            code=group.code,
            count=group.count,
            said=tuple(_said(found) for found in group.shown),
            hidden=group.hidden,
            where=name(group.where) if group.where else "",
            advice=advice_for(group.shown[0].code, url=place),
        )
        for group in grouped(findings, SHOWN)
    )


def counted(problems: Iterable[Problem], severity: Severity) -> int:
    """How many findings of a severity there are."""
    return sum(problem.count for problem in problems if problem.severity == severity)


def _said(found: Finding) -> Said:
    place = found.key if found.key is not None else found.file
    told = place is None or place in found.message
    return Said(
        key=None if found.key is None else name(found.key, LONGEST_KEY),
        place="" if told else name(place or ""),
        message=name(found.message, _LONGEST),
    )
