"""The simulated engine: N ranks in one process, each byte read once for all ranks of all layouts.

A pass goes over the checkpoint batch by batch (`dcp.load.batches`): what a batch needs is read while the
one before is worked on, then every layout in turn loads it on its ranks and compares. What is wrong with
one record is a finding in each layout, with the ranks it concerns, and the rest goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

from torch.distributed.checkpoint.planner import LoadPlanner

from dcp.archive import Archive
from dcp.checkpoint import Checkpoint
from dcp.errors import CheckpointError
from dcp.findings import Finding, has_errors
from dcp.index import ObjectEntry
from dcp.layout import Layout
from dcp.load.batches import BandNeed, Batch, batches, cut
from dcp.load.bits import Bits
from dcp.load.metadata import torch_metadata
from dcp.load.objects import examine
from dcp.load.preflight import preflight
from dcp.load.pull import Got, Pull
from dcp.load.ranks import InertPlanner, SimulatedRanks
from dcp.load.reader import BucketReader
from dcp.load.report import LayoutReport
from dcp.load.standin import Arena

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
) -> list[LayoutReport]:
    """Load a checkpoint in every layout; one report each, in order.

    Args:
        memory_budget: bytes of memory beside what the process and the index take.
        planner: makes the planner of each rank.

    Raises:
        StorageError: storage failed.
    """
    return _Pass(checkpoint, layouts, memory_budget, progress, planner).run()


class _Pass:
    def __init__(
        self,
        checkpoint: Checkpoint,
        layouts: Sequence[Layout],
        memory_budget: int,
        progress: Progress | None,
        planner: Callable[[], LoadPlanner],
    ) -> None:
        self.checkpoint = checkpoint
        self.budget = memory_budget
        self.progress = progress
        self.index, self.findings = preflight(checkpoint)
        self.reported: set[tuple[object, ...]] = {(f.code, f.file or f.key) for f in self.findings}
        self.done = 0
        self.unpickled = 0
        self.scanned = 0
        self.pull = Pull(checkpoint, budget=min(READ_AHEAD, memory_budget // 4))
        self.cuts = cut(self.index, layouts, memory_budget)
        arena = Arena()
        self.ranks = [SimulatedRanks(layout, self.index, self.cuts, arena, planner) for layout in layouts]
        self.seconds = [0.0] * len(layouts)
        self.failures: list[list[Finding]] = [[] for _ in layouts]

    def run(self) -> list[LayoutReport]:
        started = time.perf_counter()
        self._plan()
        plan = list(batches(self.index, self.cuts, self.budget))
        total = sum(need.cost for batch in plan for need in batch.needs)
        self.pull.locate(chain.from_iterable(batch.needs for batch in plan))
        for batch, (_, got) in zip(plan, self.pull.groups(batch.needs for batch in plan), strict=True):
            self._take(batch, got)
            if self.progress is not None:
                self.progress(self.done, total)
        for number, ranks in enumerate(self.ranks):
            with self._timed(number):
                ranks.check_coverage()
        shared = time.perf_counter() - started - sum(self.seconds)
        return [self._report(number, shared / len(self.ranks)) for number in range(len(self.ranks))]

    def _plan(self) -> None:
        metadata = torch_metadata(self.index)
        reader = BucketReader(self.checkpoint.url)
        for number, ranks in enumerate(self.ranks):
            with self._timed(number):
                ranks.plan(metadata, reader)

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
            for number, ranks in enumerate(self.ranks):
                with self._timed(number):
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
        found, plain = examine(entry, value)
        if found is not None:
            self.findings.append(found)
        elif plain:
            self.unpickled += 1
            for number, ranks in enumerate(self.ranks):
                with self._timed(number):
                    ranks.load_object(entry, value)
        else:
            self.scanned += 1

    def _fail(self, need: BandNeed, error: CheckpointError) -> None:
        """Report a chunk that could not be read, once, to every layout."""
        if self._is_new(error, need.need.entry.key, need.chunk):
            for ranks, failures in zip(self.ranks, self.failures, strict=True):
                concerned = ranks.holders(need.need.entry, need.need.chunk.box)
                failures.append(_failure(error, ranks=concerned))

    def _is_new(self, error: CheckpointError, *place: object) -> bool:
        """Whether neither the listing nor an earlier piece of the same record has told of it."""
        marks = {(error.code, error.file or error.key), (error.code, *place, "record")}
        new = marks.isdisjoint(self.reported)
        self.reported.add((error.code, *place, "record"))
        return new

    @contextmanager
    def _timed(self, number: int) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[number] += time.perf_counter() - started

    def _report(self, number: int, shared_seconds: float) -> LayoutReport:
        ranks = self.ranks[number]
        findings = [*self.findings, *self.failures[number], *ranks.findings]
        return LayoutReport(
            layout=str(ranks.layout),
            ranks=ranks.layout.ranks,
            ok=not has_errors(findings),
            bytes_needed=self.done,
            bytes_read=self.pull.source.bytes_read,
            requests=self.pull.source.requests,
            rank_bytes=ranks.rank_bytes,
            tensors=len(self.cuts),
            objects=self.unpickled,
            objects_scanned=self.scanned,
            seconds=round(self.seconds[number] + shared_seconds, 6),
            findings=findings,
        )


def _failure(error: CheckpointError, **detail: object) -> Finding:
    """What was not read was not tested: unlike in a validation, that is an error here."""
    found = error.as_finding()
    return found.model_copy(update={"severity": "error", "detail": {**found.detail, **detail}})
