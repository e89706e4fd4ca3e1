"""What ranks hold under one key, and keys of their own for it. Pure functions on save plans.

A rank's plan counts by its place, which is its rank in the group that saves; what ranks hold and how keys of
their own are named goes by their number in the whole job. `Local` is what a rank tells the coordinator beside
its plan. `divergences` finds what several ranks hold and do not hold
alike: whole values, and shards of which there are replicas. `to_rank_keys` gives whole values names of
their own (``rng`` becomes ``rng/rank_17``). `dedup` says which rank writes what several hold.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from dcp.boxes import Box, check_tiling
from dcp.errors import CheckpointError, UsageError
from dcp.findings import Code
from dcp.nested import Path, place
from dcp.rank_keys import rank_key
from dcp.save.files import size_of

_SIDES = 8
"""Groups of ranks that an error lists one by one."""


@dataclass(frozen=True, slots=True)
class Local:
    """What one rank tells the coordinator. It travels as the plan's ``planner_data``."""

    rank: int
    """Its number in the whole job."""
    paths: Mapping[str, Path]
    """Path of each flattened key."""
    digests: Mapping[MetadataIndex, bytes]
    """Of each item that other ranks may hold too; those that cannot be compared are left out."""
    whole: Set[str]
    """Keys whose value the rank holds whole, and would also on any other number of ranks: objects, plain
    tensors and DTensors that are replicated and nothing else."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """A key under which ranks hold different values."""

    key: str
    groups: tuple[tuple[int, ...], ...]
    """Ranks that agree with each other, the group of the lowest rank first."""
    kinds: tuple[str, ...]
    """What each group holds, in words: an object, or a tensor of some shape and dtype."""
    box: Box | None = None
    """Where it is a shard that has replicas: which part of the tensor."""

    def __str__(self) -> str:
        # One that is left is as short to name as to count.
        shown = len(self.groups) if len(self.groups) <= _SIDES + 1 else _SIDES
        sides = [_ranks(group) for group in self.groups[:shown]]
        said = " differs between "
        if len(set(self.kinds)) > 1:
            sides = [f"{kind} on {side}" for kind, side in zip(self.kinds, sides, strict=False)]
            said = " is "
        if rest := sorted(rank for group in self.groups[shown:] for rank in group):
            sides.append(f"{len(self.groups) - shown} more sides ({_ranks(rest)})")
        part = "" if self.box is None else str(self.box)
        return f"{self.key}{part}{said}{' and '.join(sides)}"


def divergences(plans: Sequence[SavePlan], locals_: Sequence[Local]) -> list[Divergence]:
    """What is not the same on all ranks that hold it."""
    sides: dict[MetadataIndex | str, dict[bytes, list[int]]] = defaultdict(lambda: defaultdict(list))
    items: dict[MetadataIndex | str, dict[bytes, WriteItem]] = defaultdict(dict)
    for plan, local in zip(plans, locals_, strict=True):
        for item in plan.items:
            digest = local.digests.get(item.index)
            if digest is not None:
                # A tensor on one rank and an object on another differ too.
                place = item.index.fqn if item.index.fqn in local.whole else item.index
                sides[place][digest].append(local.rank)
                items[place].setdefault(digest, item)
    return [
        Divergence(
            place if isinstance(place, str) else place.fqn,
            tuple(map(tuple, found.values())),
            tuple(_kind(items[place][digest]) for digest in found),
            None if isinstance(place, str) else _box(next(iter(items[place].values()))),
        )
        for place, found in sides.items()
        if len(found) > 1
    ]


def dedup(plans: Sequence[SavePlan], to_lowest_rank: bool) -> list[SavePlan]:
    """Plans in which everything stands once.

    What several ranks hold is written by the lowest of them, or else so that all ranks write about the same
    number of bytes: the largest goes first to the rank that has the least to write. (torch's own function
    counts a shard as the whole tensor, and goes by the order of the state.)
    """
    holders: dict[MetadataIndex, list[int]] = defaultdict(list)
    sizes: dict[MetadataIndex, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders[item.index].append(rank)
            sizes[item.index] = size_of(item) or 1
    loads = [0] * len(plans)
    shared: list[MetadataIndex] = []
    for index, ranks in holders.items():
        if len(ranks) == 1:
            loads[ranks[0]] += sizes[index]
        else:
            shared.append(index)
    writers: dict[MetadataIndex, int] = {}
    for index in sorted(shared, key=lambda index: -sizes[index]):
        ranks = holders[index]
        writer = ranks[0] if to_lowest_rank else min(ranks, key=loads.__getitem__)
        writers[index] = writer
        loads[writer] += sizes[index]
    return [
        dataclasses.replace(plan, items=[i for i in plan.items if writers.get(i.index, rank) == rank])
        for rank, plan in enumerate(plans)
    ]


def to_rank_keys(
    plans: Sequence[SavePlan], locals_: Sequence[Local], keys: Set[str]
) -> tuple[list[SavePlan], list[dict[str, Path]]]:
    """Give each rank's whole value of ``keys`` a key of its own; the plans and paths with these keys.

    Raises:
        UsageError: a key so made is there already.
    """
    taken = {item.index.fqn for plan in plans for item in plan.items}
    new_plans: list[SavePlan] = []
    new_paths: list[dict[str, Path]] = []
    for plan, local in zip(plans, locals_, strict=True):
        rank, paths = local.rank, dict(local.paths)
        items = []
        for item in plan.items:
            key = item.index.fqn
            if key in keys and key in local.whole:
                own = rank_key(key, rank)
                if own in taken:
                    raise UsageError(
                        f"{key} of rank {rank} would be saved as {own}, which is a key of its own in the "
                        "state: rename one of the two"
                    )
                item = dataclasses.replace(item, index=dataclasses.replace(item.index, fqn=own))
                if key in paths:
                    paths[own] = _own_path(paths[key], own, rank)
            items.append(item)
        for key in (keys & paths.keys()) - {item.index.fqn for item in items}:
            del paths[key]
        new_plans.append(dataclasses.replace(plan, items=items))
        new_paths.append(paths)
    return new_plans, new_paths


def require_one_meaning(plans: Sequence[SavePlan], paths: Sequence[Mapping[str, Path]]) -> None:
    """Every key is one place of the state, one kind, one shape and one dtype, whichever rank is asked.

    And a shard that begins at one place ends at one place, and is in a rank's plan once: torch goes by where
    it begins when it looks for replicas.

    Raises:
        CheckpointError: it is not; names the key and both sides.
    """
    places: dict[str, tuple[int, Path]] = {}
    for rank, own in enumerate(paths):
        for key, path in own.items():
            first, known = places.setdefault(key, (rank, path))
            if known != path:
                raise _two(key, f"{place(known)} on rank {first}", f"{place(path)} on rank {rank}")
    kinds: dict[str, tuple[int, str]] = {}
    boxes: dict[MetadataIndex, tuple[int, Box]] = {}
    for rank, plan in enumerate(plans):
        seen: set[MetadataIndex] = set()
        for item in plan.items:
            key, said = item.index.fqn, _kind(item)
            first, known_as = kinds.setdefault(key, (rank, said))
            if known_as != said:
                raise _two(key, f"{known_as} on rank {first}", f"{said} on rank {rank}")
            if item.index in seen:
                raise _tiling("tiling.overlap", key, f"rank {rank} would write {_box(item) or 'it'} twice")
            seen.add(item.index)
            if (box := _box(item)) is not None:
                first, other = boxes.setdefault(item.index, (rank, box))
                if other != box:
                    raise _tiling(
                        "tiling.overlap", key, f"{other} of rank {first} and {box} of rank {rank} overlap"
                    )


def require_tiling(plans: Sequence[SavePlan], alone: bool) -> None:
    """The chunks of every tensor cover it exactly once, after what several ranks hold is saved by one.

    Args:
        alone: the plan is of one rank of several, which saves only its own part.

    Raises:
        CheckpointError: ``tiling.*``; names the key, and the ranks of two chunks that overlap.
    """
    chunks: dict[str, list[tuple[int, Box]]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.tensor_data is not None and (box := _box(item)) is not None:
                chunks[item.index.fqn].append((rank, box))
                shapes[item.index.fqn] = tuple(item.tensor_data.size)
    for key, held in chunks.items():
        tiling = check_tiling(shapes[key], [box for _, box in held], limit=1)
        for number in tiling.out_of_bounds:
            rank, box = held[number]
            raise _tiling(
                "tiling.out-of-bounds",
                key,
                f"{box} of rank {rank} lies outside the shape {list(shapes[key])}",
            )
        for one, other, common in tiling.overlaps:
            (a, first), (b, second) = held[one], held[other]
            raise _tiling(
                "tiling.overlap", key, f"{first} of rank {a} and {second} of rank {b} both hold {common}"
            )
        for gap in () if alone else tiling.gaps:
            who = f"no rank of {len(plans)} holds" if len(plans) > 1 else "nothing holds"
            raise _tiling("tiling.gap", key, f"{who} {gap} of the shape {list(shapes[key])}")


def _own_path(path: Path, own: str, rank: int) -> Path:
    # An item of a list has no name to add to: the key itself becomes one at the top.
    return (*path[:-1], rank_key(path[-1], rank)) if isinstance(path[-1], str) else (own,)


def _kind(item: WriteItem) -> str:
    data = item.tensor_data
    if data is None:
        return "an object"
    what = "shards of a tensor" if item.type == WriteItemType.SHARD else "a tensor"
    return f"{what} of shape {list(data.size)} and {data.properties.dtype}".replace("torch.", "")


def _box(item: WriteItem) -> Box | None:
    if item.tensor_data is None:
        return None
    chunk = item.tensor_data.chunk
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _tiling(code: Code, key: str, what: str) -> CheckpointError:
    return CheckpointError(f"{key}: {what}", code=code, key=key)


def _two(key: str, one: str, other: str) -> CheckpointError:
    return CheckpointError(
        f"{key} is {one} and {other}, and one key can stand for one of them only: make it the same on all "
        f"ranks, or give it another name on some, or, where every rank holds it whole, a key for every rank "
        f"with per_rank=[{key!r}]",
        code="keys.kind",
        key=key,
    )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}, … ({len(ranks)} in all)" if len(ranks) > 8 else f"ranks {shown}"
