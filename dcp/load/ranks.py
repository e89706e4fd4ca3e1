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
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcp.archive import Archive
from dcp.boxes import Box, check_tiling, intersect, whole
from dcp.errors import CheckpointError
from dcp.findings import Code, Finding, finding
from dcp.index import CheckpointIndex, ObjectEntry, TensorEntry
from dcp.layout import Layout
from dcp.load.batches import Band, BandNeed
from dcp.load.bits import Bits, bits_of, first_difference, part, same
from dcp.load.metadata import chunk_number, torch_dtype
from dcp.load.reader import BucketReader, put, target_of
from dcp.load.standin import StandIn

Arrived = Sequence[tuple[BandNeed, Bits | CheckpointError]]
"""What was read for one band."""


class InertPlanner(DefaultLoadPlanner):
    """torch's default planner, except that objects are unpickled with ``weights_only`` and then dropped."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, map_location="cpu", weights_only=True)


class SimulatedRanks:
    """The ranks of one layout.

    Attributes:
        rank_bytes: bytes of tensors loaded so far, by rank.
        findings: what was found wrong so far.
    """

    def __init__(
        self,
        layout: Layout,
        index: CheckpointIndex,
        cuts: Mapping[str, Sequence[Box]],
        planner: Callable[[], LoadPlanner] = InertPlanner,
    ) -> None:
        """
        Args:
            index: of the checkpoint; its tensors that have no ``cuts`` are not loaded.
            cuts: each tensor's bands, by key.
            planner: makes the planner of each rank.
        """
        self.layout = layout
        self.rank_bytes = [0] * layout.ranks
        self.findings: list[Finding] = []
        self._entries = [e for e in index.tensors if e.key in cuts]
        self._planners = [planner() for _ in range(layout.ranks)]
        self._states: list[dict[str, StandIn | None]] = [{} for _ in range(layout.ranks)]
        self._pieces: list[dict[str, list[int]]] = [{} for _ in range(layout.ranks)]
        self._items: dict[tuple[str, int], list[tuple[int, ReadItem]]] = defaultdict(list)
        self._objects: dict[str, list[tuple[int, ReadItem]]] = defaultdict(list)
        self._loaded: dict[tuple[int, str], list[Box]] = defaultdict(list)
        self._excused: dict[str, list[Box]] = defaultdict(list)
        for entry in self._entries:
            for rank, box in enumerate(layout.boxes(entry.shape)):
                cut = [
                    (n, common) for n, band in enumerate(cuts[entry.key]) if (common := intersect(band, box))
                ]
                self._pieces[rank][entry.key] = [number for number, _ in cut]
                self._states[rank][entry.key] = StandIn(
                    entry.shape, torch_dtype(entry), [piece for _, piece in cut]
                )
        for state in self._states:
            state.update({entry.key: None for entry in index.objects})

    def plan(self, metadata: Metadata, reader: BucketReader) -> None:
        """Hold the planner conversation of all ranks."""
        plans = []
        for rank, (planner, state) in enumerate(zip(self._planners, self._states, strict=True)):
            planner.set_up_planner(dict(state), metadata, rank == 0)
            plans.append(reader.prepare_local_plan(planner.create_local_plan()))
        plans = reader.prepare_global_plan(self._planners[0].create_global_plan(plans))
        for rank, (planner, plan) in enumerate(zip(self._planners, plans, strict=True)):
            for item in planner.finish_plan(plan).items:
                key = item.dest_index.fqn
                if item.type is LoadItemType.BYTE_IO:
                    self._objects[key].append((rank, item))
                    continue
                piece = self._stand_in(rank, key).number_of(item.dest_index)
                self._items[key, self._pieces[rank][key][piece]].append((rank, item))

    def load(self, band: Band, arrived: Arrived) -> None:
        """Load one band on every rank that holds something of it, compare, and free the memory."""
        entry = band.entry
        bits = {
            need.chunk: (need, value) for need, value in arrived if not isinstance(value, CheckpointError)
        }
        self._excused[entry.key] += [n.region for n, value in arrived if isinstance(value, CheckpointError)]
        ranks = set()
        for rank, item in self._items.pop((entry.key, band.number), ()):
            source = bits.get(chunk_number(entry, item.storage_index))
            if source is None:
                continue
            need, value = source
            target = target_of(self._planners[rank], item)
            wanted = Box(tuple(item.storage_offsets), tuple(item.lengths))
            chunk = need.need.chunk.box
            inside = wanted.shifted(need.region.shifted(chunk.offsets).offsets)
            put(target, whole(wanted.sizes), part(value, inside), entry)
            self._planners[rank].commit_tensor(item, target)
            self._note(rank, entry, item, target)
            ranks.add(rank)
        for rank in ranks:
            stand_in = self._stand_in(rank, entry.key)
            for number, memory in stand_in.memory.items():
                self._compare(rank, entry, stand_in.pieces[number], bits_of(memory), bits.values())
            stand_in.memory.clear()

    def load_object(self, entry: ObjectEntry, archive: Archive) -> None:
        """Unpickle an object, which must be one that ``weights_only`` takes, on every rank."""
        for rank, item in self._objects[entry.key]:
            try:
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
        return [rank for rank, own in enumerate(self.layout.boxes(entry.shape)) if intersect(own, box)]

    def check_coverage(self) -> None:
        """Find what no read wrote, and what more than one did. To be called when everything is loaded."""
        for entry in self._entries:
            for rank, box in enumerate(self.layout.boxes(entry.shape)):
                self._check_rank(rank, entry, box)

    def _check_rank(self, rank: int, entry: TensorEntry, box: Box) -> None:
        excused = [common for region in self._excused[entry.key] if (common := intersect(region, box))]
        written = [*self._loaded[rank, entry.key], *excused]
        tiling = check_tiling(box.sizes, [region.shifted(box.offsets) for region in written])
        for gap in tiling.gaps:
            self._find_region("tiling.gap", "no read filled", rank, entry, _moved(gap, box))
        for first, second, common in tiling.overlaps:
            region = _moved(common, box)
            chunks = [str(written[first]), str(written[second])]
            self._find_region("tiling.overlap", "two reads wrote", rank, entry, region, reads=chunks)

    def _note(self, rank: int, entry: TensorEntry, item: ReadItem, target: torch.Tensor) -> None:
        offset = item.dest_index.offset
        assert offset is not None
        corner = tuple(o + d for o, d in zip(offset, item.dest_offsets, strict=True))
        self._loaded[rank, entry.key].append(Box(corner, tuple(item.lengths)))
        self.rank_bytes[rank] += target.nbytes

    def _compare(
        self,
        rank: int,
        entry: TensorEntry,
        piece: Box,
        memory: Bits,
        sources: Iterable[tuple[BandNeed, Bits]],
    ) -> None:
        for need, bits in sources:
            common = intersect(need.region, piece)
            if common is None:
                continue
            loaded = part(memory, common.shifted(piece.offsets))
            expected = part(bits, common.shifted(need.region.offsets))
            if not same(loaded, expected):
                place = first_difference(loaded, expected, len(entry.shape))
                first = [o + p for o, p in zip(common.offsets, place, strict=True)]
                self._find_region(
                    "records.mismatch", "the checkpoint does not hold what was loaded into",
                    rank, entry, common, first=first,
                )  # fmt: skip

    def _find_region(
        self, code: Code, what: str, rank: int, entry: TensorEntry, region: Box, **detail: Any
    ) -> None:
        self.findings.append(
            finding(
                code,
                f"{entry.key}: {what} {region} on rank {rank} of {self.layout}",
                key=entry.key,
                rank=rank,
                offsets=list(region.offsets),
                sizes=list(region.sizes),
                **detail,
            )
        )

    def _stand_in(self, rank: int, key: str) -> StandIn:
        found = self._states[rank][key]
        assert found is not None
        return found


def _moved(box: Box, origin: Box) -> Box:
    """A box counted from ``origin``'s corner, counted from the tensor's."""
    return Box(tuple(o + p for o, p in zip(box.offsets, origin.offsets, strict=True)), box.sizes)
