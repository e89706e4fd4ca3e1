"""Which steps a run has, and how far each has been written, from one listing of its source.

A step is a direct sub-prefix whose whole name matches one of the run's patterns; its number gives the
order. `discover` only lists; the training bucket is never written. A `FoundStep` carries the `Survey` of
its objects, so that nothing needs to be listed twice to decide what is due.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from dcp.checkpoint import Kind, Survey, fingerprint_of
from dcp.errors import NotFoundError
from dcp.index import METADATA
from dcp.storage import ObjectInfo, Store, is_safe_name
from dcp.storage.faults import calling
from tasks.ledger import StepKey
from tasks.text import writable

DEFAULT_PATTERNS = (
    r"(?:global_?)?steps?[_-]?(?P<step>\d+)",
    r"iter(?:ation)?[_-]?(?P<step>\d+)",
    r"(?:checkpoint|ckpt)[_-](?P<step>\d+)",
    r"epoch=\d+-step=(?P<step>\d+)(?:\.ckpt)?",
    r"ep\d+-ba(?P<step>\d+)",
)
"""``step_12000``, ``step-100``, ``global_step10``, ``iter_0000100``, ``checkpoint-500``,
``epoch=3-step=100.ckpt``, ``ep1-ba200``."""

MAX_DIGITS = 18
CLOCK_TOLERANCE = 60.0
"""Seconds by which a store's clock may run ahead of ours before its times are not believed."""

Progress = Literal["committed", "writing", "incomplete", "not-dcp"]
"""``committed`` steps are worth validating; ``not-dcp`` is something else that has come to rest."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A listing of a step as it was recorded; times in seconds since the epoch."""

    listing: str
    when: float
    files: int
    changed: float | None
    """Last modification of any object."""


Sightings = Callable[[str], Iterable[Sighting]]
"""The recorded sightings of the step of a name."""


@dataclass(frozen=True, slots=True)
class FoundStep:
    """One step as the source shows it."""

    name: str
    number: int
    survey: Survey
    progress: Progress
    quiet: float | None
    """Seconds since the last change; None where the objects' times do not tell."""
    missing: tuple[str, ...] = ()
    """Names of index objects that the step still lacks."""

    @property
    def bytes(self) -> int:
        """Size of all objects."""
        return sum(info.size for info in self.survey.objects.values())


@dataclass(frozen=True, slots=True)
class Discovery:
    """What a source holds: steps in the order of their numbers, and what is none.

    ``unknown`` are other directories, and what only has a step's name: an object, or a link to nowhere.
    """

    steps: tuple[FoundStep, ...]
    unknown: tuple[str, ...]


def compile_pattern(text: str) -> re.Pattern[str]:
    """A pattern for step directories.

    Raises:
        ValueError: it is no regular expression, or has no group for the number.
    """
    try:
        pattern = re.compile(text, re.ASCII)
    except re.error as error:
        raise ValueError(f"is no regular expression ({error})") from None
    if "step" not in pattern.groupindex and pattern.groups != 1:
        raise ValueError(r"needs a group for the number, e.g. step_(\d+) or step_(?P<step>\d+)")
    return pattern


def step_number(name: str, patterns: Iterable[re.Pattern[str]]) -> int | None:
    """The number of the step called ``name``; None if it is no step's name."""
    if name.startswith(".") or not is_safe_name(name):
        return None
    for pattern in patterns:
        match = pattern.fullmatch(name)
        if match:
            digits = match["step"] if "step" in pattern.groupindex else match[1]
            if digits and digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS:
                return int(digits)
    return None


def discover(
    store: Store,
    *,
    patterns: Sequence[str] = DEFAULT_PATTERNS,
    parts: Sequence[str] = (),
    grace_seconds: float,
    now: float,
    sightings: Sightings | None = None,
) -> Discovery:
    """List a source and judge how far each step is.

    Args:
        store: the source.
        patterns: as `compile_pattern` takes them.
        parts: checkpoints that every step must have.
        grace_seconds: how long nothing may have changed before a step without index counts as incomplete.
        now: seconds since the epoch.
        sightings: asked where the objects' own times cannot tell how long nothing has changed.

    Raises:
        NotFoundError: there is nothing at the source.
        StorageError: it cannot be listed.
    """
    compiled = [compile_pattern(pattern) for pattern in patterns]
    steps: list[FoundStep] = []
    unknown: list[str] = []
    directories, others = _contents(store, compiled)
    unknown += [name for name in others if step_number(name, compiled) is not None]
    for name, objects in directories.items():
        number = step_number(name, compiled)
        if number is None:
            unknown.append(writable(name))
            continue
        survey = Survey(store.child(name), objects)
        if not objects and sightings is not None and any(sighting.files for sighting in sightings(name)):
            # The empty directory of a step that was removed.
            continue
        steps.append(
            judge(
                name,
                number,
                survey,
                parts=parts,
                grace_seconds=grace_seconds,
                now=now,
                sightings=sightings,
            )
        )
    steps.sort(key=lambda step: (step.number, step.name))
    return Discovery(tuple(steps), tuple(sorted(unknown)))


def _contents(
    store: Store, patterns: Sequence[re.Pattern[str]]
) -> tuple[dict[str, dict[str, ObjectInfo]], set[str]]:
    """Objects by directory, and the names of what is no directory: objects, and links to nowhere."""
    if "://" not in store.url:
        return _on_disk(store, patterns)
    found: dict[str, dict[str, ObjectInfo]] = {}
    others: set[str] = set()
    for info in store.objects():
        top, mark, rest = info.name.partition("/")
        if mark:
            found.setdefault(top, {})[rest] = ObjectInfo(rest, info.size, info.modified, info.identity)
        else:
            others.add(top)
    return found, others


def _on_disk(
    store: Store, patterns: Sequence[re.Pattern[str]]
) -> tuple[dict[str, dict[str, ObjectInfo]], set[str]]:
    """The same of a disk, where a directory may be empty, and one that is no step's may be closed to us."""
    found: dict[str, dict[str, ObjectInfo]] = {}
    names = store.directories()
    for name in names:
        if step_number(name, patterns) is None:
            found[name] = {}
            continue
        # It may have been removed since.
        with suppress(NotFoundError):
            found[name] = {info.name: info for info in store.child(name).objects()}
    return found, set(calling(store.url, os.listdir, store.url)) - set(names)


def judge(
    name: str,
    number: int,
    survey: Survey,
    *,
    parts: Sequence[str],
    grace_seconds: float,
    now: float,
    sightings: Sightings | None = None,
) -> FoundStep:
    """How far one step is, from its listing; arguments as `discover` takes them."""
    missing = _missing(survey, parts)
    quiet = _quiet(survey, now)
    listing = survey.listing_identity
    known = list(sightings(name)) if sightings else []
    if _only_lost(survey, known, listing):
        # Somebody removes it: no object's time tells since when, and what is half removed is not torn.
        quiet = None
    # A rank-local save has no last file: only rest tells that every rank has written its own.
    elif not missing and survey.kind is not Kind.RANK_LOCAL:
        return FoundStep(name, number, survey, "committed", quiet)
    rested = quiet
    if quiet is None:
        first = min((sighting.when for sighting in known if sighting.listing == listing), default=None)
        rested = None if first is None else now - first
    progress: Progress
    if rested is None or rested < grace_seconds:
        progress = "writing"
    elif not missing:
        progress = "committed"
    else:
        progress = "not-dcp" if survey.kind is Kind.FOREIGN and not parts else "incomplete"
    return FoundStep(name, number, survey, progress, quiet, missing)


def _only_lost(survey: Survey, known: Sequence[Sighting], listing: str) -> bool:
    """Whether objects were removed since the step was last seen otherwise, and none was written."""
    others = [sighting for sighting in known if sighting.listing != listing]
    if not others:
        return False
    last = max(others, key=lambda sighting: sighting.when)
    return len(survey.objects) < last.files and (survey.last_change or 0.0) <= (last.changed or 0.0)


def _missing(survey: Survey, parts: Sequence[str]) -> tuple[str, ...]:
    if parts:
        return tuple(f"{part}/{METADATA}" for part in parts if part not in survey.parts)
    if survey.kind in (Kind.COMMITTED, Kind.RANK_LOCAL):
        return ()
    if survey.kind is Kind.PARTS:
        return tuple(f"{part}/{METADATA}" for part in survey.begun)
    return (METADATA,)


def _quiet(survey: Survey, now: float) -> float | None:
    """Seconds since the last change; None if unknown, or if the writer's clock runs far ahead of ours."""
    changed = survey.last_change
    return None if changed is None or changed > now + CLOCK_TOLERANCE else max(0.0, now - changed)


def sighting_of(facts: Mapping[str, Any], when: float) -> Sighting:
    """The sighting that a ``seen`` record's facts make."""
    return Sighting(str(facts.get("listing")), when, int(facts.get("files", 0)), facts.get("changed"))


def describe(step: FoundStep) -> dict[str, Any]:
    """Facts of a step for a ``seen`` record."""
    return {
        "listing": step.survey.listing_identity,
        "number": step.number,
        "files": len(step.survey.objects),
        "bytes": step.bytes,
        "changed": step.survey.last_change,
        "committed": committed_at(step.survey),
    }


def committed_at(found: Survey) -> float | None:
    """When a step was committed: the last change of any of its indices, seconds since the epoch."""
    indices = [METADATA, *found.rank_files.values()]
    indices += [name for name in found.objects if name.partition("/")[2].endswith(METADATA)]
    times = [found.objects[name].modified for name in indices if name in found.objects]
    return max((time for time in times if time is not None), default=None)


def provisional_key(step: str, found: Survey) -> StepKey:
    """The key of a step whose index has not been read, or cannot be."""
    return StepKey(step, fingerprint_of(found.objects.values()))
