"""`validate`: can this checkpoint be resumed, and if not, where is the damage?

Each check of `dcp.checks` gives findings; here they are brought together with the state of the step
(DESIGN: committed, writing, incomplete, torn, not-dcp) into one `ValidationReport`. A step of several
parts (`model/` and `optim/`) is judged as a whole; names in its findings begin with the part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from typing import Any

from pydantic import SerializerFunctionWrapHandler, model_serializer

from dcp.checkpoint import Checkpoint, Kind, Survey, changes, fingerprint_of, open_checkpoint, survey
from dcp.checks.evolution import check_evolution
from dcp.checks.files import NEWER_SECONDS, check_files
from dcp.checks.keys import IGNORED, check_keys
from dcp.checks.optimizer import check_optimizers, read_members
from dcp.checks.paths import check_paths
from dcp.checks.ranks import check_ranks
from dcp.checks.scrub import Progress, Scrubbed, TensorHealth
from dcp.checks.scrub import scrub as read_all
from dcp.checks.subclasses import is_subclass, unchecked
from dcp.checks.tiling import check_tensor
from dcp.contract import Contract, contract_at, read_contract
from dcp.errors import CheckpointError
from dcp.findings import Finding, Report, State, finding, has_errors
from dcp.foreign import describe_foreign
from dcp.index import METADATA, CheckpointIndex
from dcp.pickles.scan import Allowance
from dcp.records import Records
from dcp.sizes import human_bytes, human_span

GRACE_SECONDS = 1800.0
"""How long nothing may have changed before a step without an index counts as incomplete."""
_SAME_TIME = 60.0
"""Seconds by which clocks of two machines differ without anybody noticing."""
_TORN = {"files.missing", "files.truncated", "files.newer-than-metadata"}
_TOLD_BY_INDEX = _TORN | {"files.unsafe-path", "records.missing", "records.out-of-bounds"}
"""Codes that a scrub meets again where the index and the listing have told already."""


class Stats(Report):
    """What was looked at. ``bytes`` is the size of all objects; ``seconds`` the duration of the checks."""

    keys: int = 0
    tensors: int = 0
    chunks: int = 0
    bytes: int = 0
    files: int = 0
    seconds: float = 0.0


class ValidationReport(Report):
    """The verdict on one checkpoint. ``ok`` means committed and without an error finding."""

    checkpoint: str
    state: State
    ok: bool
    fingerprint: str
    findings: list[Finding]
    stats: Stats
    tensors: dict[str, TensorHealth] | None = None
    """Content of every sound tensor by key; only after a scrub."""

    @model_serializer(mode="wrap")
    def _without_absent_tensors(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = handler(self)
        if self.tensors is None:
            document.pop("tensors", None)
        return document


def validate(
    url: str | PathLike[str] | Survey,
    *,
    contract: Contract | str | None = None,
    against: str | None = None,
    scrub: bool = False,
    copied: bool = False,
    ignore: Sequence[str] = IGNORED,
    allow: Sequence[str] = (),
    progress: Progress | None = None,
    grace_seconds: float = GRACE_SECONDS,
    newer_seconds: float = NEWER_SECONDS,
    now: float | None = None,
    **options: Any,
) -> ValidationReport:
    """Check a checkpoint from its index and a listing, and with ``scrub`` from every byte it holds.

    Args:
        url: the checkpoint, or a step directory whose parts are checkpoints; or a survey of it, whose indices
            are then read once for all that it is given to.
        contract: expected keys, or where to read them.
        against: another checkpoint whose keys are expected; with ``scrub``, its values are compared too.
        scrub: read every byte and hold it against every checksum there is.
        copied: times of objects mean nothing, because this is a copy.
        ignore: globs on keys whose departures from the contract do not count.
        allow: classes that objects may ask for beyond the built-in lists (``pkg.mod.Class``, ``pkg.*``).
        progress: called during a scrub with bytes done and bytes in all.
        grace_seconds: a step without an index is incomplete once nothing has changed for so many seconds.
        newer_seconds: a step is torn where a data file is newer than the index by more seconds.
        now: seconds since the epoch to judge ages by; the clock's by default.
        options: passed to the filesystem.

    Raises:
        UsageError: the contract or its location is wrong, or there is no filesystem for ``url``.
        MetadataError, NotLoadableError: the index of ``against`` is unusable or absent; those of ``url`` are
            in the report.
        StorageError: storage failed, which says nothing of the checkpoint.
    """
    started = time.perf_counter()
    allowance = Allowance(allow)
    expected = read_contract(contract) if isinstance(contract, str) else contract
    if against is not None:
        expected = contract_at(survey(against, **options))
    found = survey(url, **options)
    judge = _Judge(
        copied=copied,
        grace=grace_seconds,
        newer=newer_seconds,
        now=now or time.time(),
        scrub=(lambda c: read_all(c, allow=allowance, progress=progress)) if scrub else None,
    )
    verdict = judge.step(found)
    if expected is not None and verdict.index is not None:
        verdict.findings += check_keys(expected, verdict.index, ignore=ignore)
    if scrub and against is not None:
        earlier = judge.step(survey(against, **options))
        verdict.findings += check_evolution(verdict.tensors, earlier.tensors, against)
    return ValidationReport(
        checkpoint=found.store.url,
        state=verdict.state,
        ok=verdict.state == "committed" and not has_errors(verdict.findings),
        fingerprint=verdict.fingerprint,
        findings=verdict.findings,
        stats=_stats(found, verdict.index, time.perf_counter() - started),
        tensors=verdict.tensors if scrub else None,
    )


class _Verdict:
    def __init__(
        self,
        state: State,
        fingerprint: str,
        findings: Iterable[Finding],
        index: CheckpointIndex | None = None,
    ) -> None:
        self.state = state
        self.fingerprint = fingerprint
        self.findings = list(findings)
        self.index = index
        self.tensors: dict[str, TensorHealth] = {}


class _Judge:
    def __init__(
        self,
        *,
        copied: bool,
        grace: float,
        newer: float,
        now: float,
        scrub: Callable[[Checkpoint], Scrubbed] | None,
    ) -> None:
        self.scrub = scrub
        self.copied = copied
        self.grace = grace
        self.newer = newer
        self.now = now

    def step(self, found: Survey) -> _Verdict:
        if found.kind is Kind.PARTS:
            return self._parts(found)
        if found.kind is Kind.UNCOMMITTED:
            return self._uncommitted(found)
        if found.kind is Kind.FOREIGN:
            message = f"{found.store.url} is {describe_foreign(found.store.url, found.objects)}"
            return _Verdict(
                "not-dcp",
                fingerprint_of(found.objects.values()),
                [finding("metadata.unsupported", message, files=sorted(found.objects)[:100])],
            )
        return self._committed(found)

    def _uncommitted(self, found: Survey) -> _Verdict:
        changed = found.last_change
        age = self.now - changed if changed is not None else None
        state: State = "writing" if age is not None and age < self.grace else "incomplete"
        if age is None:
            since = ""
        elif age < -_SAME_TIME:
            since = f"; dated {human_span(-age)} ahead of this machine's clock"
        else:
            since = f"; nothing changed for {human_span(max(0.0, age))}"
        count = len(found.objects)
        size = human_bytes(sum(info.size for info in found.objects.values()))
        message = f"no {METADATA}: {count} object{'' if count == 1 else 's'}, {size}{since}"
        return _Verdict(
            state,
            fingerprint_of(found.objects.values()),
            [finding("incomplete.no-metadata", message, file=METADATA, seconds=age, grace=self.grace)],
        )

    def _committed(self, found: Survey) -> _Verdict:
        try:
            checkpoint = open_checkpoint(found)
        except CheckpointError as error:
            return _Verdict("committed", fingerprint_of(found.objects.values()), [error.as_finding()])
        findings = [*check_files(checkpoint, newer_seconds=self.newer, copied=self.copied)]
        findings += _told_apart(checkpoint)
        findings += check_paths(checkpoint.index)
        findings += check_ranks(checkpoint.index)
        members, faults = read_members(checkpoint)
        findings += check_optimizers(checkpoint.index, members)
        # A scrub reads the same records and says the same of them.
        if self.scrub is not None:
            faults = [f for f in faults if f.code == "records.unchecked"]
        findings += _new(faults, findings)
        if checkpoint.index.ranks is not None:
            findings.append(_rank_local(checkpoint.index))
        scrubbed = Scrubbed() if self.scrub is None else self.scrub(checkpoint)
        findings += _new(scrubbed.findings, findings)
        findings += changes(checkpoint)
        torn = any(f.code in _TORN and f.severity == "error" for f in findings)
        state: State = "torn" if torn else "committed"
        verdict = _Verdict(state, checkpoint.fingerprint, findings, checkpoint.index)
        verdict.tensors = scrubbed.tensors
        return verdict

    def _parts(self, found: Survey) -> _Verdict:
        """Every part alone; the step is as good as its worst part, and its keys are all parts' keys.

        A part without an index was not committed, and so the step was not.
        """
        verdicts = {name: self.step(found.part(name)) for name in (*found.parts, *found.begun)}
        findings = [f.inside(name) for name, verdict in verdicts.items() for f in verdict.findings]
        states = {verdict.state for verdict in verdicts.values()}
        state = next(s for s in _WORST_FIRST if s in states)
        joined = _Verdict(
            state,
            fingerprint_of(
                found.objects.values(), b"".join(verdicts[name].fingerprint.encode() for name in found.parts)
            ),
            findings,
            _joined({name: v.index for name, v in verdicts.items() if v.index is not None}),
        )
        joined.tensors = {f"{name}/{k}": t for name, v in verdicts.items() for k, t in v.tensors.items()}
        return joined


_WORST_FIRST: tuple[State, ...] = ("torn", "incomplete", "not-dcp", "writing", "committed")


def _new(found: Iterable[Finding], told: Sequence[Finding]) -> list[Finding]:
    """Findings from records, without those that the index and the listing have told of the same place."""
    before = [each for each in told if each.code in _TOLD_BY_INDEX]
    keys = {each.key for each in before if each.key is not None}
    files = {each.file for each in before if each.file is not None}
    return [
        each
        for each in found
        if each.code not in _TOLD_BY_INDEX or (each.key not in keys and each.file not in files)
    ]


def _told_apart(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Findings about tilings, of which a record too short for its tensor may be another class's whole one."""
    records = Records(checkpoint.store, checkpoint.objects)
    for entry in checkpoint.index.tensors:
        found = list(check_tensor(entry))
        if found and {f.code for f in found} == {"records.mismatch"} and is_subclass(records, entry):
            found = [unchecked(entry)]
        yield from found


def _rank_local(index: CheckpointIndex) -> Finding:
    ranks = index.ranks or ()
    return finding(
        "metadata.unsupported",
        f"rank-local save of {len(ranks)} ranks (__R.metadata): a stock load on other ranks reads only the "
        "first of them and leaves the rest of each tensor as it was; read here as one checkpoint",
        severity="warning",
        ranks=list(ranks),
    )


def _joined(parts: dict[str, CheckpointIndex]) -> CheckpointIndex | None:
    entries = {
        f"{part}/{key}": entry for part, index in parts.items() for key, entry in index.entries.items()
    }
    return CheckpointIndex(entries=entries, paths=None) if parts else None


def _stats(found: Survey, index: CheckpointIndex | None, seconds: float) -> Stats:
    return Stats(
        keys=len(index.entries) if index else 0,
        tensors=len(index.tensors) if index else 0,
        chunks=sum(len(entry.chunks) for entry in index.tensors) if index else 0,
        bytes=sum(info.size for info in found.objects.values()),
        files=len(found.objects),
        seconds=round(seconds, 6),
    )
