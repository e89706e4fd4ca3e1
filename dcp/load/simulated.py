"""The simulated engine: N ranks in one process, each byte read once for all ranks of all layouts.

A pass goes over the checkpoint batch by batch (`dcp.load.batches`): what a batch needs is read while the
one before is worked on, then every layout in turn loads it on its ranks and compares. The planner
conversation is held once for each slice of keys, of which all but the largest checkpoints have only one.
What is wrong with one record is a finding in each layout, with the ranks it concerns, and the rest goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import add

from torch.distributed.checkpoint.planner import LoadPlanner

from dcp.archive import Archive
from dcp.checkpoint import Checkpoint
from dcp.checks.subclasses import is_subclass, unchecked
from dcp.collector import gc_paused
from dcp.errors import CheckpointError
from dcp.findings import Finding, has_errors
from dcp.index import CheckpointIndex, ObjectEntry
from dcp.layout import Layout
from dcp.load.batches import BandNeed, Batch, batches, bytes_of, cut, slices
from dcp.load.bits import Bits
from dcp.load.counting import Columns, counts
from dcp.load.metadata import known_to_torch, torch_metadata
from dcp.load.objects import NOTHING, examine
from dcp.load.preflight import preflight
from dcp.load.pull import Got, Pull
from dcp.load.ranks import InertPlanner, SimulatedRanks
from dcp.load.reader import BucketReader
from dcp.load.report import LayoutReport
from dcp.load.standin import Arena
from dcp.pickles.scan import Allowance
from dcp.records import Records

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

READ_AHEAD = 64 << 20
"""Most bytes read ahead of the batch that is worked on, where the memory budget would allow more."""


def load_simulated(
    checkpoint: Checkpoint,
    layouts: Sequence[Layout],
    memory_budget: int,
    progress: Progress | None = None,
    planner: Callable[[], LoadPlanner] = InertPlanner,
    allow: Allowance = NOTHING,
    copied: bool = False,
) -> list[LayoutReport]:
    """Load a checkpoint in every layout; one report each, in order.

    Args:
        memory_budget: bytes of memory beside what the process and the index take.
        planner: makes the planner of each rank.
        allow: classes that objects may ask for beyond the built-in lists.
        copied: data files may be newer than the index.

    Raises:
        StorageError: storage failed.
    """
    return _Pass(checkpoint, layouts, memory_budget, progress, planner, allow, copied).run()


@dataclass(slots=True)
class _Tally:
    """What has been found and done in one layout so far."""

    layout: Layout
    rank_bytes: list[int]
    rank_seconds: list[float]
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started


class _Pass:
    def __init__(
        self,
        checkpoint: Checkpoint,
        layouts: Sequence[Layout],
        memory_budget: int,
        progress: Progress | None,
        planner: Callable[[], LoadPlanner],
        allow: Allowance,
        copied: bool,
    ) -> None:
        self.layouts = layouts
        self.budget = memory_budget
        self.progress = progress
        self.planner = planner
        self.allow = allow
        self.index, self.findings = known_to_torch(*preflight(checkpoint, copied=copied))
        self.reported: set[tuple[object, ...]] = {(f.code, f.file or f.key) for f in self.findings}
        self.total = bytes_of(self.index)
        self.columns = Columns.of(self.index, layouts[0].rules)
        self.done = 0
        self.unpickled = 0
        self.scanned = 0
        self.pull = Pull(checkpoint, budget=min(READ_AHEAD, memory_budget // 4))
        self.records = Records(checkpoint.store, checkpoint.objects)
        self.reader = BucketReader(checkpoint.url)
        self.arena = Arena()
        self.tallies = [_Tally(layout, [0] * layout.ranks, [0.0] * layout.ranks) for layout in layouts]
        self.ranks: list[SimulatedRanks] = []

    def run(self) -> list[LayoutReport]:
        started = time.perf_counter()
        for part in slices(self.index):
            self._run_slice(part)
        shared = time.perf_counter() - started - sum(tally.seconds for tally in self.tallies)
        return [self._report(tally, shared / len(self.tallies)) for tally in self.tallies]

    def _run_slice(self, part: CheckpointIndex) -> None:
        """Plan, read and check some of the keys, and forget all about them."""
        cuts = cut(part, self.layouts, self.budget)
        metadata = torch_metadata(part)
        self.ranks = [SimulatedRanks(each, part, cuts, self.arena, self.planner) for each in self.layouts]
        for tally, ranks in self._by_layout():
            with tally.timed():
                ranks.plan(metadata, self.reader)
        with gc_paused():
            plan = list(batches(part, cuts, self.budget))
        self.pull.locate(chain.from_iterable(batch.needs for batch in plan))
        for batch, (_, got) in zip(plan, self.pull.groups(batch.needs for batch in plan), strict=True):
            self._take(batch, got)
            if self.progress is not None:
                self.progress(self.done, self.total)
        for tally, ranks in self._by_layout():
            with tally.timed():
                ranks.check_coverage()
            tally.findings += ranks.findings
            tally.rank_bytes = list(map(add, tally.rank_bytes, ranks.rank_bytes))
            tally.rank_seconds = list(map(add, tally.rank_seconds, ranks.rank_seconds))
        self.pull.forget()

    def _by_layout(self) -> Iterator[tuple[_Tally, SimulatedRanks]]:
        return zip(self.tallies, self.ranks, strict=True)

    def _take(self, batch: Batch, got: list[Got]) -> None:
        answers = iter(got)
        for band in batch.bands:
            arrived: list[tuple[BandNeed, Bits | CheckpointError]] = []
            for need in band.needs:
                value = next(answers)
                assert not isinstance(value, Archive)
                arrived.append((need, value))
                if isinstance(value, CheckpointError):
                    self._fail(need, value)
            for tally, ranks in self._by_layout():
                with tally.timed():
                    ranks.load(band, arrived)
        for wanted, value in zip(batch.objects, answers, strict=True):
            self._take_object(wanted.entry, value)
        self.done += sum(need.cost for need in batch.needs)

    def _take_object(self, entry: ObjectEntry, value: Got) -> None:
        if isinstance(value, CheckpointError):
            if self._is_new(value, entry.key):
                self.findings.append(_failure(value))
            return
        assert isinstance(value, Archive)
        found, plain = examine(entry, value, self.allow)
        if found is not None:
            self.findings.append(found)
        elif plain:
            self.unpickled += 1
            for tally, ranks in self._by_layout():
                with tally.timed():
                    ranks.load_object(entry, value)
        else:
            self.scanned += 1

    def _fail(self, need: BandNeed, error: CheckpointError) -> None:
        """Report a chunk that could not be read, once, to every layout."""
        entry = need.need.entry
        if not self._is_new(error, entry.key, need.chunk):
            return
        if error.code == "records.undecodable" and is_subclass(self.records, entry):
            # Its record is no shorter than plain bytes would be, so that its content alone tells what it is.
            if (told := unchecked(entry)) not in self.findings:
                self.findings.append(told)
            return
        for tally, ranks in self._by_layout():
            concerned = ranks.holders(entry, need.need.chunk.box)
            tally.findings.append(_failure(error, ranks=concerned))

    def _is_new(self, error: CheckpointError, *place: object) -> bool:
        """Whether neither the listing nor an earlier piece of the same record has told of it."""
        marks = {(error.code, error.file or error.key), (error.code, *place, "record")}
        new = marks.isdisjoint(self.reported)
        self.reported.add((error.code, *place, "record"))
        return new

    def _report(self, tally: _Tally, shared_seconds: float) -> LayoutReport:
        findings = [*self.findings, *tally.findings]
        alone = [reads.bucket_reader for reads in counts(self.columns, tally.layout)]
        return LayoutReport(
            layout=str(tally.layout),
            ranks=tally.layout.ranks,
            ok=not has_errors(findings),
            bytes_needed=self.total,
            bytes_read=self.pull.source.bytes_read,
            requests=self.pull.source.requests,
            rank_bytes=tally.rank_bytes,
            rank_read=[each.bytes for each in alone],
            rank_requests=[each.requests for each in alone],
            rank_seconds=[round(seconds, 6) for seconds in tally.rank_seconds],
            tensors=len(self.index.tensors),
            objects=self.unpickled,
            objects_scanned=self.scanned,
            seconds=round(tally.seconds + shared_seconds, 6),
            findings=findings,
        )


def _failure(error: CheckpointError, **detail: object) -> Finding:
    """What was not read was not tested: unlike in a validation, that is an error here."""
    found = error.as_finding()
    return found.model_copy(update={"severity": "error", "detail": {**found.detail, **detail}})
