"""Scrub: every byte that the index refers to read once, and held against every checksum there is.

Each tensor is taken through `dcp.exporting.pump` in C order, several tensors at once. That checks every
chunk's record (CRCs, dtype, shape, strides, length); on the way the tensor gets a digest that does not
depend on how it was chunked, and a look at its values. Objects are read, checked, and judged by the
globals they ask for, never executed. Records that carry no checksum are said to be unchecked.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, islice

from dcp.boxes import Box, Shape, check_tiling
from dcp.checkpoint import Checkpoint
from dcp.checks.optimizer import is_optimizer_state
from dcp.checks.sound import is_sound
from dcp.checks.subclasses import damage_of, is_subclass, unchecked
from dcp.checks.values import LOOKED_AT, MEASURED, Health, measure
from dcp.errors import CheckpointError
from dcp.exporting.bands import bands
from dcp.exporting.pump import LOCAL_BAND, REMOTE_BAND, Pump
from dcp.findings import Finding, Report, finding
from dcp.index import Chunks, ObjectEntry, TensorEntry
from dcp.pickles.scan import Allowance, Verdict, judge, scan
from dcp.records import Records

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

_BATCH = 1000


class TensorHealth(Report):
    """A tensor's content. ``digest`` is of its bytes in C order.

    Counts are None for types without NaN; ``norm`` and ``zero`` also for one-byte floats, which need a scale.
    """

    digest: str
    norm: float | None
    nan: int | None
    inf: int | None
    zero: bool | None


@dataclass
class Scrubbed:
    """What a scrub found.

    Attributes:
        findings: in index order.
        tensors: content by key, for tensors without a fault.
        bytes_read: bytes taken from storage for elements.
    """

    findings: list[Finding] = field(default_factory=list)
    tensors: dict[str, TensorHealth] = field(default_factory=dict)
    bytes_read: int = 0


def scrub(
    checkpoint: Checkpoint, *, allow: Allowance | None = None, progress: Progress | None = None
) -> Scrubbed:
    """Read and check everything.

    Args:
        checkpoint: what the index itself gets wrong is left to the checks of the index.
        allow: classes that objects may ask for beyond the built-in lists.
        progress: called as bytes are read.

    Raises:
        StorageError: storage failed, which says nothing of the checkpoint.
    """
    return _Scrub(checkpoint, allow, progress).run()


@dataclass
class _Content:
    """What was found in one tensor."""

    digest: str = ""
    health: Health = field(default_factory=Health)
    faults: list[CheckpointError] = field(default_factory=list)
    unchecked: Counter[str] = field(default_factory=Counter)
    bytes_read: int = 0


def _undecodable(content: _Content) -> bool:
    """Whether all that is wrong is that records hold no plain tensor."""
    return bool(content.faults) and all(fault.code == "records.undecodable" for fault in content.faults)


class _Scrub:
    def __init__(self, checkpoint: Checkpoint, allow: Allowance | None, progress: Progress | None) -> None:
        self.index = checkpoint.index
        self.records = Records(checkpoint.store, checkpoint.objects)
        self.allow = allow
        self.progress = progress
        remote = "://" in checkpoint.url
        self.threads = 8 if remote else 2
        self.band = REMOTE_BAND if remote else LOCAL_BAND
        self.local = threading.local()
        self.lock = threading.Lock()
        self.done = 0
        self.result = Scrubbed()
        self.unchecked: Counter[str] = Counter()
        self.seen: set[tuple[str | None, str, str]] = set()
        self.total = sum(entry.nbytes for entry in self.index.tensors)

    def run(self) -> Scrubbed:
        self._tensors()
        self._objects()
        for name, count in self.unchecked.items():
            self.result.findings.append(
                finding(
                    "records.unchecked",
                    f"{count} records in {name} carry no CRC: their bytes cannot be checked",
                    file=name,
                    count=count,
                )
            )
        return self.result

    def _report(self, found: Finding) -> None:
        """Keep a finding once: a damaged chunk fails every band that needs it."""
        same = (found.key, found.code, str(found.detail.get("offsets")))
        if same not in self.seen:
            self.seen.add(same)
            self.result.findings.append(found)

    # --- tensors

    def _tensors(self) -> None:
        jobs = chain.from_iterable(map(_readable, self.index.tensors))
        with ThreadPoolExecutor(self.threads, thread_name_prefix="scrub") as pool:
            while batch := list(islice(jobs, _BATCH)):
                for entry, content in zip(batch, pool.map(self._content, batch), strict=True):
                    if _undecodable(content) and is_subclass(self.records, entry):
                        self._report(unchecked(entry))
                    else:
                        for fault in self._causes(entry, content):
                            self._report(fault.as_finding())
                    if not content.faults and not isinstance(entry, _Part):
                        self._keep(entry, content)
                    self.unchecked += content.unchecked
                    self.result.bytes_read += content.bytes_read

    def _causes(self, entry: TensorEntry, content: _Content) -> Sequence[CheckpointError]:
        """What is wrong with a tensor. Of one that is no plain one only its archive tells of damage."""
        if not _undecodable(content):
            return content.faults
        found = [damage_of(self.records, entry.key, record) for record in entry.chunks.records]
        return [error for error in found if error is not None] or content.faults

    def _content(self, entry: TensorEntry) -> _Content:
        """Read one tensor from front to back. One thread does it all, while the bytes are in its cache."""
        import xxhash

        pump = Pump(self.records, band_bytes=self.band, threads=1)
        buffer = self._buffer()
        digest = xxhash.xxh3_128()
        content = _Content()
        broken: set[Shape] = set()
        for band in bands(entry, self.band):
            if broken and broken.issuperset(piece.chunk.box.offsets for piece in band.pieces):
                # Only chunks that are known to be damaged would fill it.
                if len(broken) >= len(entry.chunks):
                    break
                continue
            filled = pump.take(entry, band, buffer)
            for fault in filled.faults:
                content.faults.append(fault)
                offsets = fault.detail.get("offsets")
                every = [box.offsets for box in entry.chunks.boxes]
                broken.update([tuple(offsets)] if isinstance(offsets, list) else every)
            if not content.faults:
                digest.update(filled.view)
                if entry.dtype in LOOKED_AT:
                    content.health.add(measure(filled.view, entry.dtype))
            self._advance(band.nbytes)
        content.digest = f"xxh3-128:{digest.hexdigest()}"
        content.unchecked = pump.unchecked
        content.bytes_read = pump.bytes_read
        return content

    def _buffer(self) -> bytearray:
        """This thread's own."""
        buffer: bytearray | None = getattr(self.local, "buffer", None)
        if buffer is None:
            buffer = self.local.buffer = bytearray(self.band)
        return buffer

    def _advance(self, nbytes: int) -> None:
        if self.progress is not None:
            with self.lock:
                self.done += nbytes
                self.progress(self.done, self.total)

    def _keep(self, entry: TensorEntry, content: _Content) -> None:
        measured, counted = entry.dtype in MEASURED, entry.dtype in LOOKED_AT
        health = content.health
        self.result.tensors[entry.key] = TensorHealth(
            digest=content.digest,
            norm=health.norm if measured else None,
            nan=health.nan if counted else None,
            inf=health.inf if counted else None,
            zero=health.zero if measured else None,
        )
        if measured and health.zero and len(entry.shape) > 1:
            # Moments of an optimizer are zero before their first step; weights hardly ever are.
            self._report(
                finding(
                    "values.zero",
                    f"{entry.key}: all {health.elements} elements are zero",
                    key=entry.key,
                    severity="info" if is_optimizer_state(entry.key) else None,
                    elements=health.elements,
                )
            )
        if health.nan or health.inf:
            self._report(
                finding(
                    "values.nonfinite",
                    f"{entry.key}: of {health.elements} elements {health.nan} are NaN, {health.inf} infinite",
                    key=entry.key,
                    nan=health.nan,
                    inf=health.inf,
                    elements=health.elements,
                )
            )

    # --- objects

    def _objects(self) -> None:
        with ThreadPoolExecutor(8, thread_name_prefix="objects") as pool:
            for found in pool.map(self._object, self.index.objects):
                for each in found:
                    self._report(each)

    def _object(self, entry: ObjectEntry) -> list[Finding]:
        try:
            archive = self.records.read_object(entry)
        except CheckpointError as error:
            return [error.as_finding()]
        return list(judge_object(entry, archive.pickle, self.allow))


def judge_object(entry: ObjectEntry, pickle: bytes, allow: Allowance | None) -> Iterator[Finding]:
    """Findings about a pickled object, from the globals it asks for."""
    judgement = judge(scan(pickle), allow)
    file = entry.record.path if entry.record is not None else None
    if judgement.verdict is Verdict.REACHES_CODE:
        asked = ", ".join(judgement.reaching[:5]) or str(judgement.error)
        yield finding(
            "records.unsafe",
            f"{entry.key} would run code when it is unpickled: {asked}",
            key=entry.key,
            file=file,
            globals=[*judgement.reaching, *judgement.unknown],
        )
    elif judgement.error is not None:
        message = f"{entry.key}: its pickle cannot be read: {judgement.error}"
        yield finding("records.undecodable", message, key=entry.key, file=file)
    elif judgement.unknown:
        yield finding(
            "records.unsafe",
            f"{entry.key} asks for classes that are on no list: {', '.join(judgement.unknown[:5])}",
            key=entry.key,
            file=file,
            severity="warning",
            globals=list(judgement.unknown),
        )


def _readable(entry: TensorEntry) -> Iterable[TensorEntry]:
    """The tensor, if its chunks tile it; otherwise each chunk as a tensor of its own.

    What no records could hold is not read: its tiling tells of it.
    """
    if check_tiling(entry.shape, entry.chunks.boxes, limit=1).ok:
        return filter(is_sound, (entry,))
    parts = (
        _Part(entry.key, entry.dtype, box.sizes, Chunks((Box((0,) * len(box.sizes), box.sizes),), (record,)))
        for box, record in zip(entry.chunks.boxes, entry.chunks.records, strict=True)
        if len(box.sizes) == len(box.offsets) and min(box.sizes, default=0) >= 0
    )
    return filter(is_sound, parts)


class _Part(TensorEntry):
    """One chunk of a tensor whose chunks do not tile it."""

    __slots__ = ()
