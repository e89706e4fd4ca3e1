"""Everything that the page of one checkpoint says, gathered as values: `gather_checkpoint`.

Nothing here draws. What is judged already (by the lifecycle) is taken over; otherwise the checkpoint is
validated first. A step of several parts is gathered as a whole: its keys and files begin with the part.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from dcp.checkpoint import Kind, Survey, open_checkpoint, survey
from dcp.checks.scrub import TensorHealth
from dcp.errors import CheckpointError
from dcp.findings import Finding, State
from dcp.index import CheckpointIndex, TensorEntry
from dcp.inspection import FileInfo
from dcp.producer import guess_producer
from dcp.validation import ValidationReport, validate
from flows.report.contents import ABSENT, Contents, pack_contents
from flows.report.costs import ExportCost, LoadCosts, export_cost, load_costs
from flows.report.health import Health, health_of
from flows.report.joining import joined
from flows.report.problems import Problem, counted, problems_of
from flows.report.shares import Shares, shares_of
from flows.text import name
from tasks.ledger import timestamp

_MOST_ABSENT = 1000
"""Objects that only the index names, of which the page knows the names."""


@dataclass(frozen=True, slots=True)
class Group:
    """Keys that begin alike. ``bytes`` of tensors in memory and of objects in storage."""

    name: str
    keys: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Totals:
    """What the checkpoint holds; ``bytes`` in memory, ``file_bytes`` in storage."""

    keys: int
    tensors: int
    objects: int
    chunks: int
    bytes: int
    files: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """One checkpoint. ``made`` and ``changed`` are UTC in ISO 8601."""

    url: str
    name: str
    made: str
    changed: str | None
    state: State
    ok: bool
    scrubbed: bool
    """Whether every byte was read, not only the index and the listing."""
    fingerprint: str
    producer: str
    version: str | None
    totals: Totals
    problems: tuple[Problem, ...]
    groups: tuple[Group, ...]
    dtypes: tuple[Group, ...]
    shares: Shares
    loads: LoadCosts
    export: ExportCost | None
    health: Health | None
    contents: Contents | None
    """None where there is no index that could be read."""
    published: tuple[tuple[str, str, str], ...]
    """What the lifecycle did with it: name, value and more; empty for a checkpoint looked at alone."""

    @property
    def errors(self) -> int:
        return counted(self.problems, "error")

    @property
    def warnings(self) -> int:
        return counted(self.problems, "warning")


@dataclass(frozen=True, slots=True)
class Judged:
    """What is known of a checkpoint from an earlier validation."""

    state: State
    ok: bool
    fingerprint: str
    findings: Sequence[Finding]
    tensors: Mapping[str, TensorHealth] | None = None

    @classmethod
    def of(cls, report: ValidationReport) -> Judged:
        """The verdict of a validation report."""
        return cls(report.state, report.ok, report.fingerprint, report.findings, report.tensors)


def gather_checkpoint(
    url: str,
    *,
    judged: Judged | None = None,
    published: Sequence[tuple[str, str, str]] = (),
    now: float | None = None,
    options: Mapping[str, Any] | None = None,
    **validation: Any,
) -> CheckpointFacts:
    """Look at a checkpoint from every side.

    Args:
        url: the checkpoint, or a step of several parts.
        judged: an earlier verdict, instead of validating now.
        published: what else to say of it.
        now: seconds since the epoch; the clock's by default.
        options: passed to the filesystem.
        validation: arguments of `dcp.validation.validate`.

    Raises:
        UsageError: the contract or its location is wrong.
        StorageError: storage failed, which says nothing of the checkpoint.
    """
    options = options or {}
    at = now or time.time()
    found = survey(url, **options)
    if judged is None:
        judged = Judged.of(validate(found, now=at, **validation, **options))
    parts = _parts(found)
    index = joined({prefix: part.checkpoint.index for prefix, part in parts.items()})
    files = [FileInfo(name=each, bytes=info.size, records=0) for each, info in found.objects.items()]
    absent: list[FileInfo] = []
    if index is not None:
        counts = index.files()
        files = [file.model_copy(update={"records": counts.get(file.name, 0)}) for file in files]
        lacking = (each for each in counts if each not in found.objects)
        absent = [
            FileInfo(name=each, bytes=0, records=counts[each]) for each in islice(lacking, _MOST_ABSENT)
        ]
    return CheckpointFacts(
        url=name(found.store.url, 1000),
        name=name(found.store.url.rstrip("/").rpartition("/")[2]),
        made=timestamp(at),
        changed=None if found.last_change is None else timestamp(found.last_change),
        state=judged.state,
        ok=judged.ok,
        scrubbed=judged.tensors is not None,
        fingerprint=judged.fingerprint,
        producer=_producer(found, parts),
        version=_version(parts),
        totals=_totals(index, files),
        problems=problems_of(judged.findings, found.store.url),
        groups=_groups(index),
        dtypes=_dtypes(index),
        shares=shares_of(index, files, absent),
        loads=load_costs(parts),
        export=export_cost(parts),
        health=None if judged.tensors is None else health_of(judged.tensors, judged.findings),
        contents=None
        if index is None
        else pack_contents(
            index.entries,
            {file.name: file.bytes for file in files} | {file.name: ABSENT for file in absent},
            judged.findings,
            judged.tensors,
        ),
        published=tuple(published),
    )


def _parts(found: Survey) -> dict[str, Survey]:
    """The checkpoints of a step whose index can be read, by the prefix of their names; it is read here."""
    surveys = {"": found}
    if found.kind is Kind.PARTS:
        surveys = {f"{part}/": found.part(part) for part in found.parts}
    readable = {}
    for prefix, each in surveys.items():
        try:
            open_checkpoint(each)
        except CheckpointError:
            # Validation has said why.
            continue
        readable[prefix] = each
    return readable


def _producer(found: Survey, parts: Mapping[str, Survey]) -> str:
    return guess_producer(found, next(iter(parts.values())).checkpoint.index) if parts else "unknown"


def _version(parts: Mapping[str, Survey]) -> str | None:
    """The torch that the index names, if it names one."""
    told = [part.checkpoint.index.version for part in parts.values()][:1]
    return name(told[0], 40) if told and told[0] else None


def _totals(index: CheckpointIndex | None, files: Sequence[FileInfo]) -> Totals:
    tensors = index.tensors if index else ()
    objects = index.objects if index else ()
    held = sum(entry.record.length for entry in objects if entry.record is not None)
    return Totals(
        keys=len(tensors) + len(objects),
        tensors=len(tensors),
        objects=len(objects),
        chunks=sum(len(entry.chunks) for entry in tensors),
        bytes=sum(entry.nbytes for entry in tensors) + held,
        files=len(files),
        file_bytes=sum(file.bytes for file in files),
    )


_MOST_GROUPS = 12


def _groups(index: CheckpointIndex | None) -> tuple[Group, ...]:
    """The keys by what stands before their first dot; the rest of many is one group."""
    sizes: dict[str, tuple[int, int]] = {}
    for key, entry in (index.entries if index else {}).items():
        top = key.partition(".")[0] if isinstance(entry, TensorEntry) else "objects"
        size = entry.nbytes if isinstance(entry, TensorEntry) else entry.record.length if entry.record else 0
        count, total = sizes.get(top, (0, 0))
        sizes[top] = (count + 1, total + size)
    return _largest(sizes)


def _dtypes(index: CheckpointIndex | None) -> tuple[Group, ...]:
    sizes: dict[str, tuple[int, int]] = {}
    for entry in index.tensors if index else ():
        count, total = sizes.get(entry.dtype, (0, 0))
        sizes[entry.dtype] = (count + 1, total + entry.nbytes)
    return _largest(sizes)


def _largest(sizes: Mapping[str, tuple[int, int]]) -> tuple[Group, ...]:
    groups = [Group(name(top, 60), *sizes[top]) for top in sorted(sizes, key=lambda top: -sizes[top][1])]
    if len(groups) <= _MOST_GROUPS:
        return tuple(groups)
    rest = groups[_MOST_GROUPS - 1 :]
    other = Group(f"{len(rest)} others", sum(g.keys for g in rest), sum(g.bytes for g in rest))
    return (*groups[: _MOST_GROUPS - 1], other)
