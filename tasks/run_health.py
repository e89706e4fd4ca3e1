"""How a run as a whole fares, from listings alone: has it stopped saving, does junk pile up?

`find_stall` compares the time since the last commit with the run's own rhythm; `find_junk` adds up what
uncommitted steps hold. Both are pure, and each result has a `StepKey` under `RUN` that is the same as long as
it is the same problem, so that the ledger can tell it once (`tasks.alert`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from tasks.discover import FoundStep
from tasks.ledger import RUN, StepKey

RECENT = 20
"""Intervals of which the usual one is the median."""
FEWEST = 3
"""Commits from which on a run has a rhythm."""


@dataclass(frozen=True, slots=True, order=True)
class Commit:
    """A commit of a step; ``at`` in seconds since the epoch, by the clock of the source's store."""

    at: float
    step: str


@dataclass(frozen=True, slots=True)
class Stall:
    """No commit for much longer than usual; times in seconds."""

    last: Commit
    usual: float
    quiet: float

    @property
    def key(self) -> StepKey:
        return run_key("stalled", self.last.step, f"{self.last.at:.3f}")


@dataclass(frozen=True, slots=True)
class Junk:
    """Uncommitted steps that nobody writes any more and that take much space; oldest first."""

    steps: tuple[str, ...]
    bytes: int
    since: float
    """Last change of the oldest, seconds since the epoch."""
    key: StepKey
    """The same until the space doubles or the oldest is removed."""


def run_key(problem: str, *what: str) -> StepKey:
    """The key of a problem of the whole run."""
    return StepKey(RUN, hashlib.sha256("\0".join((problem, *what)).encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How often a run saves: its newest commit, and the usual seconds between two."""

    last: Commit
    usual: float


def rhythm_of(commits: Iterable[Commit]) -> Rhythm | None:
    """The rhythm of a run; None where there are too few commits to tell."""
    ordered = sorted(commits)
    if len(ordered) < FEWEST:
        return None
    recent = ordered[-RECENT - 1 :]
    return Rhythm(ordered[-1], median(after.at - before.at for before, after in pairwise(recent)))


def find_stall(commits: Iterable[Commit], now: float, *, factor: float, minimum: float) -> Stall | None:
    """Whether a run has stopped saving.

    Args:
        commits: of all steps; their order does not matter.
        now: seconds since the epoch.
        factor: how many usual intervals may pass; 0 never finds a stall.
        minimum: seconds that may pass however often the run saves.
    """
    rhythm = rhythm_of(commits)
    if factor <= 0 or rhythm is None:
        return None
    quiet = now - rhythm.last.at
    if quiet <= max(factor * rhythm.usual, minimum):
        return None
    return Stall(rhythm.last, rhythm.usual, quiet)


def find_junk(steps: Sequence[FoundStep], *, size: int, age: float) -> Junk | None:
    """Whether uncommitted steps take much space.

    Args:
        steps: of the run.
        size: bytes from which on it is much; 0 never finds junk.
        age: seconds without a change after which an uncommitted step counts.
    """
    idle = [(step.quiet, step) for step in steps if step.progress == "incomplete" and step.quiet is not None]
    junk = sorted(((quiet, step.name, step) for quiet, step in idle if quiet >= age), reverse=True)
    total = sum(step.bytes for _, _, step in junk)
    if size <= 0 or not junk or total < size:
        return None
    _, name, oldest = junk[0]
    doublings = (total // size).bit_length()
    return Junk(
        steps=tuple(name for _, name, _ in junk),
        bytes=total,
        since=oldest.survey.last_change or 0.0,
        key=run_key("junk", name, oldest.survey.listing_identity, str(doublings)),
    )
