"""All ranks of one layout in one process, loading through torch's own planner.

Each rank has a planner and a state dict of stand-ins, and goes through the whole conversation: set up,
local plan, the coordinator's global plan, finish. Then bands are loaded as they arrive: what the plans
ask for is copied to where the planner says, and afterwards every element that a rank holds is compared
with what the index says of it. The comparison rests on boxes alone and not on the plans, so a plan that
reads from or writes to a wrong place cannot agree with it.
"""

from __future__ import annotations

import io
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import add, sub

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcp.archive import Archive
from dcp.boxes import Box, check_tiling, intersect
from dcp.collector import gc_paused
from dcp.errors import CheckpointError
from dcp.findings import Finding, finding
from dcp.index import CheckpointIndex, ObjectEntry, TensorEntry
from dcp.layout import Layout
from dcp.load.batches import Band, BandNeed
from dcp.load.bits import Bits, bits_of, is_bits, part
from dcp.load.metadata import chunk_number, torch_dtype
from dcp.load.reader import BucketReader, put, target_of
from dcp.load.regions import Cuts, moved
from dcp.load.standin import Arena, StandIn
from dcp.load.verdicts import about_region, compare, joined, mismatch

Arrived = Sequence[tuple[BandNeed, Bits | CheckpointError]]
"""What was read for one band."""


class _Source:
    """What was read of one chunk for one band."""

    __slots__ = ("bits", "chunk", "origin", "region")

    def __init__(self, need: BandNeed, bits: Bits) -> None:
        self.bits = bits
        self.chunk = need.need.chunk.box
        self.region = need.region
        self.origin = tuple(map(sub, need.region.offsets, self.chunk.offsets))


class InertPlanner(DefaultLoadPlanner):
    """torch's default planner, except that objects are unpickled with ``weights_only`` and then dropped."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, map_location="cpu", weights_only=True)


class SimulatedRanks:
    """The ranks of one layout.

    Attributes:
        rank_bytes: bytes of tensors loaded so far, by rank.
        rank_seconds: time taken by planning, copying and comparing so far, by rank.
        findings: what was found wrong so far.
    """

    def __init__(
        self,
        layout: Layout,
        index: CheckpointIndex,
        cuts: Mapping[str, Cuts],
        arena: Arena,
        planner: Callable[[], LoadPlanner] = InertPlanner,
    ) -> None:
        """
        Args:
            index: of what is to be loaded.
            cuts: each tensor's bands, by key.
            arena: memory for one band at a time; may be shared with other layouts.
            planner: makes the planner of each rank.
        """
        self.layout = layout
        self._arena = arena
        self.rank_bytes = [0] * layout.ranks
        self.rank_seconds = [0.0] * layout.ranks
        self.findings: list[Finding] = []
        self._entries = index.tensors
        self._planners = [planner() for _ in range(layout.ranks)]
        self._states: list[dict[str, StandIn | None]] = [{} for _ in range(layout.ranks)]
        self._pieces: list[dict[str, list[int]]] = [{} for _ in range(layout.ranks)]
        self._items: dict[tuple[str, int], dict[int, list[ReadItem]]] = defaultdict(dict)
        self._objects: dict[str, list[tuple[int, ReadItem]]] = defaultdict(list)
        self._loaded: dict[tuple[int, str], list[Box]] = defaultdict(list)
        self._excused: dict[str, list[Box]] = defaultdict(list)
        for entry in self._entries:
            for rank, box in enumerate(layout.boxes(entry.shape, entry.key)):
                cut = list(cuts[entry.key].overlapping(box))
                self._pieces[rank][entry.key] = [number for number, _ in cut]
                self._states[rank][entry.key] = StandIn(
                    entry.shape, torch_dtype(entry), [piece for _, piece in cut], arena
                )
        for state in self._states:
            state.update({entry.key: None for entry in index.objects})

    def plan(self, metadata: Metadata, reader: BucketReader) -> None:
        """Hold the planner conversation of all ranks."""
        plans = []
        with gc_paused():
            for rank, (planner, state) in enumerate(zip(self._planners, self._states, strict=True)):
                with self._timed(rank):
                    planner.set_up_planner(dict(state), metadata, rank == 0)
                    plans.append(reader.prepare_local_plan(planner.create_local_plan()))
            plans = reader.prepare_global_plan(self._planners[0].create_global_plan(plans))
            for rank, (planner, plan) in enumerate(zip(self._planners, plans, strict=True)):
                with self._timed(rank):
                    self._sort(rank, planner.finish_plan(plan).items)

    def _sort(self, rank: int, items: Sequence[ReadItem]) -> None:
        """Lay a rank's reads where `load` and `load_object` will look for them."""
        for item in items:
            key = item.dest_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                self._objects[key].append((rank, item))
                continue
            piece = self._stand_in(rank, key).number_of(item.dest_index)
            band = self._items[key, self._pieces[rank][key][piece]]
            band.setdefault(rank, []).append(item)

    def load(self, band: Band, arrived: Arrived) -> None:
        """Load one band on every rank that holds something of it, compare, and free the memory."""
        entry = band.entry
        sources = {need.chunk: _Source(need, value) for need, value in arrived if is_bits(value)}
        self._excused[entry.key] += [n.region for n, value in arrived if not is_bits(value)]
        expected = joined(band.box, [(s.region, s.bits) for s in sources.values()])
        for rank, items in self._items.pop((entry.key, band.number), {}).items():
            with self._timed(rank):
                done = [self._copy(rank, entry, item, sources) for item in items]
                if any(done):
                    self._compare(rank, entry, expected)
        self._arena.reset()

    def _copy(self, rank: int, entry: TensorEntry, item: ReadItem, sources: Mapping[int, _Source]) -> bool:
        """Do one read of a rank, if its chunk could be read."""
        hint = item.storage_index.index
        source = None if hint is None else sources.get(hint)
        if source is None or source.chunk.offsets != item.storage_index.offset:
            source = sources.get(chunk_number(entry, item.storage_index))
        if source is None:
            return False
        target = target_of(self._planners[rank], item)
        lengths = tuple(item.lengths)
        inside = Box(tuple(map(sub, item.storage_offsets, source.origin)), lengths)
        put(target, Box((0,) * len(lengths), lengths), part(source.bits, inside), entry)
        self._planners[rank].commit_tensor(item, target)
        offset = item.dest_index.offset
        assert offset is not None
        self._loaded[rank, entry.key].append(Box(tuple(map(add, item.dest_offsets, offset)), lengths))
        self.rank_bytes[rank] += target.nbytes
        return True

    def _compare(self, rank: int, entry: TensorEntry, expected: Sequence[tuple[Box, Bits]]) -> None:
        stand_in = self._stand_in(rank, entry.key)
        for number, memory in stand_in.memory.items():
            loaded = bits_of(memory)
            for region, bits in expected:
                found = compare(loaded, stand_in.pieces[number], bits, region)
                if found is not None:
                    self.findings.append(mismatch(entry, self.layout, rank, *found))
        stand_in.memory.clear()

    @contextmanager
    def _timed(self, rank: int) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.rank_seconds[rank] += time.perf_counter() - started

    def load_object(self, entry: ObjectEntry, archive: Archive) -> None:
        """Unpickle an object, which must be one that ``weights_only`` takes, on every rank."""
        for rank, item in self._objects[entry.key]:
            try:
                with self._timed(rank):
                    self._planners[rank].load_bytes(item, io.BytesIO(archive.data))
            except (
                RuntimeError,
                ValueError,
                TypeError,
                LookupError,
                EOFError,
                pickle.UnpicklingError,
            ) as error:
                why = str(error).partition("\n")[0]
                self.findings.append(
                    finding(
                        "records.undecodable",
                        f"{entry.key}: torch cannot unpickle it: {why}",
                        key=entry.key,
                        file=None if entry.record is None else entry.record.path,
                        rank=rank,
                    )
                )
                return

    def holders(self, entry: TensorEntry, box: Box) -> list[int]:
        """Ranks that hold any of ``box``."""
        held = self.layout.boxes(entry.shape, entry.key)
        return [rank for rank, own in enumerate(held) if intersect(own, box)]

    def check_coverage(self) -> None:
        """Find what no read wrote, and what more than one did. To be called when everything is loaded."""
        for entry in self._entries:
            for rank, box in enumerate(self.layout.boxes(entry.shape, entry.key)):
                self._check_rank(rank, entry, box)

    def _check_rank(self, rank: int, entry: TensorEntry, box: Box) -> None:
        excused = [common for region in self._excused[entry.key] if (common := intersect(region, box))]
        written = [*self._loaded[rank, entry.key], *excused]
        tiling = check_tiling(box.sizes, [region.shifted(box.offsets) for region in written])
        for gap in tiling.gaps:
            region = moved(gap, box.offsets)
            self.findings.append(
                about_region("tiling.gap", "no read filled", entry, self.layout, rank, region)
            )
        for first, second, common in tiling.overlaps:
            region = moved(common, box.offsets)
            reads = [str(written[first]), str(written[second])]
            self.findings.append(
                about_region(
                    "tiling.overlap", "two reads wrote", entry, self.layout, rank, region, reads=reads
                )
            )

    def _stand_in(self, rank: int, key: str) -> StandIn:
        found = self._states[rank][key]
        assert found is not None
        return found
