"""The stage *retire*: which steps of the training bucket are kept, and how the others are deleted.

A `Policy` says of steps which it keeps and why; policies compose with ``|`` (any keeps) and ``&`` (all keep).
`plan_retirement` is pure: from `Directory` values and a policy to one `Decision` a directory. What the
lifecycle does not know to be whole, published and idle is kept whatever the policy says
(`Directory.guarded`), and so is the newest good step.

Deletion has two phases, both recorded in the ledger. ``trashed-N`` only says that the step is not wanted;
nothing is moved and readers notice nothing. If it is wanted again before the time in the trash is over,
``restored-N`` says so. Afterwards `delete_step` writes ``deleting`` with every object it is going to delete,
deletes the indices first, so that nobody can resume from what is half deleted, then the data, and records
``retired``. Killed anywhere in between, the next call goes on from there. An object that was written again
since the decision is never deleted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dcp.checkpoint import Survey
from dcp.errors import ChangedError, NotFoundError
from dcp.findings import Report
from dcp.index import METADATA
from dcp.sizes import human_span
from dcp.storage import Store
from tasks.discover import FoundStep
from tasks.ledger import Ledger, StepKey
from tasks.snapshot import Snapshot

Action = Literal["keep", "trash", "delete"]


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory of the source. ``committed`` in seconds since the epoch, ``bytes`` in all its files."""

    name: str
    number: int | None
    """None if it is no step."""
    key: StepKey | None
    """Under which the ledger knows what is there now."""
    listing: str
    bytes: int
    files: int
    committed: float | None
    good: bool = False
    """Known to be whole and published; only such steps count for policies."""
    guarded: str = ""
    """Why it must not be touched, whatever a policy says; empty if it may be."""
    trashed: float | None = None
    """When it was put into the trash, seconds since the epoch."""
    deleting: bool = False
    """A deletion was begun and did not end."""


class Policy(ABC):
    """Says which steps are kept."""

    @abstractmethod
    def keeps(self, steps: Sequence[Directory], now: float) -> Mapping[str, str]:
        """Names of the steps that are kept, each with the reason; ``now`` in seconds since the epoch."""

    def __or__(self, other: Policy) -> Policy:
        return AnyOf((self, other))

    def __and__(self, other: Policy) -> Policy:
        return AllOf((self, other))


@dataclass(frozen=True, slots=True)
class Latest(Policy):
    """The steps with the highest numbers."""

    count: int

    def keeps(self, steps: Sequence[Directory], now: float) -> Mapping[str, str]:
        ordered = sorted(steps, key=lambda step: (step.number or 0, step.name))
        return {step.name: f"one of the latest {self.count}" for step in ordered[-self.count :]}


@dataclass(frozen=True, slots=True)
class Every(Policy):
    """Steps whose number is a multiple."""

    steps: int

    def keeps(self, steps: Sequence[Directory], now: float) -> Mapping[str, str]:
        return {s.name: f"one of every {self.steps}" for s in steps if (s.number or 0) % self.steps == 0}


@dataclass(frozen=True, slots=True)
class Best(Policy):
    """Steps that were named."""

    names: tuple[str, ...]

    def keeps(self, steps: Sequence[Directory], now: float) -> Mapping[str, str]:
        return {step.name: "named as one of the best" for step in steps if step.name in self.names}


@dataclass(frozen=True, slots=True)
class NewerThan(Policy):
    """Steps that were committed recently, and those of which nobody knows when."""

    seconds: float

    def keeps(self, steps: Sequence[Directory], now: float) -> Mapping[str, str]:
        return {
            step.name: f"committed within {human_span(self.seconds)}"
            for step in steps
            if step.committed is None or now - step.committed <= self.seconds
        }


@dataclass(frozen=True, slots=True)
class AnyOf(Policy):
    """What any of several policies keeps."""

    policies: tuple[Policy, ...]

    def keeps(self, steps: Sequence[Directory], now: float) -> Mapping[str, str]:
        kept: dict[str, str] = {}
        for policy in self.policies:
            for name, why in policy.keeps(steps, now).items():
                kept[name] = f"{kept[name]}, {why}" if name in kept else why
        return kept


@dataclass(frozen=True, slots=True)
class AllOf(Policy):
    """What all of several policies keep."""

    policies: tuple[Policy, ...]

    def keeps(self, steps: Sequence[Directory], now: float) -> Mapping[str, str]:
        each = [policy.keeps(steps, now) for policy in self.policies]
        return {
            step.name: " and ".join(kept[step.name] for kept in each)
            for step in steps
            if all(step.name in kept for kept in each)
        }


class Decision(Report):
    """What is to become of one directory. ``number`` is None for one that is no step."""

    step: str
    number: int | None
    action: Action
    why: str
    bytes: int
    files: int
    fingerprint: str | None
    done: bool = False
    """Whether it was carried out, in this call or before."""
    failed: str = ""
    """Why it could not be carried out."""


def plan_retirement(
    directories: Sequence[Directory], policy: Policy, *, now: float, trash: float, delete: bool
) -> list[Decision]:
    """Decide what becomes of every directory; nothing is touched.

    Args:
        directories: everything in the source.
        policy: which steps are kept.
        now: seconds since the epoch.
        trash: seconds between decision and deletion.
        delete: whether anything may be deleted.
    """
    good = [directory for directory in directories if directory.good and not directory.deleting]
    kept = dict(policy.keeps(good, now))
    if good:
        newest = max(good, key=lambda step: (step.number or 0, step.name))
        kept.setdefault(newest.name, "the newest good step")
    decisions = []
    for directory in directories:
        action, why = _decide(directory, kept.get(directory.name), now, trash, delete)
        decisions.append(
            Decision(
                step=directory.name,
                number=directory.number,
                action=action,
                why=why,
                bytes=directory.bytes,
                files=directory.files,
                fingerprint=directory.key.fingerprint if directory.key else None,
            )
        )
    return decisions


def _decide(
    directory: Directory, kept: str | None, now: float, trash: float, delete: bool
) -> tuple[Action, str]:
    if directory.deleting:
        return ("delete", "its deletion was begun") if delete else ("keep", "its deletion was switched off")
    if directory.guarded or kept is not None:
        return "keep", directory.guarded or str(kept)
    if not directory.good:
        return "keep", "it is not known to be good"
    if directory.trashed is None:
        return "trash", "nothing keeps it"
    left = directory.trashed + trash - now
    if left > 0:
        return "trash", f"in the trash, for {human_span(left)} more"
    return ("delete", "its time in the trash is over") if delete else ("trash", "deletion is switched off")


def trash_number(stages: frozenset[str]) -> int | None:
    """Under which number a step is in the trash; None if it is not."""
    numbers = [int(s.removeprefix("trashed-")) for s in stages if s.startswith("trashed-")]
    newest = max(numbers, default=None)
    return None if newest is None or f"restored-{newest}" in stages else newest


def put_into_trash(ledger: Ledger, key: StepKey, why: str) -> None:
    """Record that a step is not wanted any more."""
    stages = ledger.stages(key)
    if trash_number(stages) is None:
        number = sum(stage.startswith("trashed-") for stage in stages) + 1
        ledger.create(key, f"trashed-{number}", {"message": why})


def take_out_of_trash(ledger: Ledger, key: StepKey, why: str) -> None:
    """Record that a step in the trash is wanted again."""
    number = trash_number(ledger.stages(key))
    if number is not None:
        ledger.create(key, f"restored-{number}", {"message": why})


def delete_step(ledger: Ledger, key: StepKey, store: Store, listing: str, why: str) -> int:
    """Delete a step's objects, or go on where another call ended, and return how many this one deleted.

    Args:
        ledger: of the run.
        key: what is to be deleted.
        store: the step's directory, opened with credentials that may delete.
        listing: the listing identity that was decided on.
        why: for the record.

    Raises:
        ChangedError: the step was written again since; what is new stays.
        StorageError: storage failed; what is left is deleted by a later call.
    """
    try:
        found = Survey(store, {info.name: info for info in store.objects()})
    except NotFoundError:
        found = Survey(store, {})
    if "deleting" not in ledger.stages(key):
        if found.listing_identity != listing:
            raise _changed(store)
        objects = {info.name: info.identity for info in found.objects.values()}
        ledger.create(key, "deleting", {"objects": objects, "why": why})
    wanted: Mapping[str, str] = ledger.read(key, "deleting").facts["objects"]
    deleted = 0
    kept = [name for name in found.objects if name not in wanted]
    for name in sorted(found.objects.keys() & wanted.keys(), key=lambda name: (not _is_index(name), name)):
        try:
            current = store.info(name).identity
        except NotFoundError:
            continue
        if current != wanted[name]:
            kept.append(name)
            continue
        store.remove(name)
        deleted += 1
    store.prune()
    ledger.create(key, "retired", {"objects": len(wanted), "why": why, "kept": sorted(kept)[:100]})
    if kept:
        raise _changed(store)
    return deleted


def _is_index(name: str) -> bool:
    return name.rpartition("/")[2].endswith(METADATA)


def _changed(store: Store) -> ChangedError:
    return ChangedError(
        f"{store.url} was written again since it was decided to delete it; what is new stays",
        code="files.newer-than-metadata",
    )


def half_deleted(step: FoundStep, snapshot: Snapshot) -> bool:
    """Whether what is left of a step is being deleted, and nothing of it was written since."""
    for key in snapshot.by_step.get(step.name, ()):
        seen = snapshot.summary(key, "seen")
        if "deleting" in snapshot.of(key) and seen:
            changed = step.survey.last_change or 0.0
            fewer = len(step.survey.objects) < int(seen.get("files", 0))
            if fewer and changed <= float(seen.get("changed") or 0.0):
                return True
    return False
