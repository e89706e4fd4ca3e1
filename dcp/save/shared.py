"""What ranks hold under one key, and keys of their own for it. Pure functions on save plans.

A rank's plan counts by its place: plan ``n`` is of rank ``n`` of the group that saves. `Local` is what a
rank tells the coordinator beside its plan. `divergences` finds keys whose whole value is not the same on
all ranks; `to_rank_keys` gives such a key's values names of their own (``rng`` becomes ``rng/rank_17``).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from dcp.boxes import Box, check_tiling
from dcp.errors import CheckpointError, UsageError

Path = tuple[Any, ...]
"""Where a value stands in the nested state: names and list positions."""


@dataclass(frozen=True, slots=True)
class Local:
    """What one rank tells the coordinator. It travels as the plan's ``planner_data``."""

    paths: Mapping[str, Path]
    """Path of each flattened key."""
    digests: Mapping[str, bytes | None]
    """Of each value that is not sharded; None where it cannot be compared."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """A key under which ranks hold different values."""

    key: str
    groups: tuple[tuple[int, ...], ...]
    """Ranks that agree with each other, the group of the lowest rank first."""

    def __str__(self) -> str:
        sides = " and ".join(_ranks(group) for group in self.groups[:3])
        more = f" and {len(self.groups) - 3} more sides" if len(self.groups) > 3 else ""
        return f"{self.key} differs between {sides}{more}"


def rank_key(key: str, rank: int) -> str:
    """The key of one rank's own value."""
    return f"{key}/rank_{rank}"


def is_whole(item: WriteItem) -> bool:
    """Whether an item is of a value that a rank holds whole: a plain tensor or an object."""
    return item.type != WriteItemType.SHARD


def divergences(plans: Sequence[SavePlan], locals_: Sequence[Local]) -> list[Divergence]:
    """Keys whose whole value is not the same on all ranks that hold it."""
    sides: dict[str, dict[bytes, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, (plan, local) in enumerate(zip(plans, locals_, strict=True)):
        for item in filter(is_whole, plan.items):
            digest = local.digests.get(item.index.fqn)
            if digest is not None:
                sides[item.index.fqn][digest].append(rank)
    return [
        Divergence(key, tuple(map(tuple, found.values()))) for key, found in sides.items() if len(found) > 1
    ]


def to_rank_keys(
    plans: Sequence[SavePlan], locals_: Sequence[Local], keys: Set[str], numbers: Sequence[int]
) -> tuple[list[SavePlan], list[dict[str, Path]]]:
    """Give each rank's whole value of ``keys`` a key of its own; the plans and paths with these keys.

    Args:
        numbers: the rank of each plan.

    Raises:
        UsageError: a key so made is there already.
    """
    taken = {item.index.fqn for plan in plans for item in plan.items}
    new_plans: list[SavePlan] = []
    new_paths: list[dict[str, Path]] = []
    for plan, local, rank in zip(plans, locals_, numbers, strict=True):
        paths = dict(local.paths)
        items = []
        for item in plan.items:
            key = item.index.fqn
            if key in keys and is_whole(item):
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

    Raises:
        CheckpointError: it is not; names the key and both sides.
    """
    places: dict[str, tuple[int, Path]] = {}
    for rank, own in enumerate(paths):
        for key, path in own.items():
            first, known = places.setdefault(key, (rank, path))
            if known != path:
                raise _two(key, f"{_place(known)} on rank {first}", f"{_place(path)} on rank {rank}")
    kinds: dict[str, tuple[int, str]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            key, said = item.index.fqn, _kind(item)
            first, known_as = kinds.setdefault(key, (rank, said))
            if known_as != said:
                raise _two(key, f"{known_as} on rank {first}", f"{said} on rank {rank}")


def require_tiling(plans: Sequence[SavePlan]) -> None:
    """The chunks of every tensor cover it exactly once, after what several ranks hold is saved by one.

    Raises:
        CheckpointError: ``tiling.*``; names the key, and the ranks of two chunks that overlap.
    """
    chunks: dict[str, list[tuple[int, Box]]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.tensor_data is not None:
                chunk = item.tensor_data.chunk
                chunks[item.index.fqn].append((rank, Box(tuple(chunk.offsets), tuple(chunk.sizes))))
                shapes[item.index.fqn] = tuple(item.tensor_data.size)
    for key, held in chunks.items():
        tiling = check_tiling(shapes[key], [box for _, box in held], limit=1)
        for number in tiling.out_of_bounds:
            rank, box = held[number]
            raise CheckpointError(
                f"{key}: {box} of rank {rank} lies outside the shape {list(shapes[key])}",
                code="tiling.out-of-bounds",
                key=key,
            )
        for one, other, common in tiling.overlaps:
            (a, first), (b, second) = held[one], held[other]
            raise CheckpointError(
                f"{key}: {first} of rank {a} and {second} of rank {b} both hold {common}",
                code="tiling.overlap",
                key=key,
            )
        # A rank that saves alone holds only its own part.
        for gap in tiling.gaps if len(plans) > 1 else ():
            raise CheckpointError(
                f"{key}: no rank of {len(plans)} holds {gap} of the shape {list(shapes[key])}",
                code="tiling.gap",
                key=key,
            )


def require_distinct(paths: Iterable[Path]) -> None:
    """No two places of a nested state have one key once it is flattened.

    Raises:
        UsageError: two have; names both.
    """
    seen: dict[str, Path] = {}
    for path in paths:
        key = ".".join(map(str, path))
        known = seen.setdefault(key, path)
        if known is not path:
            raise UsageError(
                f"{_place(known)} and {_place(path)} of the state would both be saved as {key}: rename one"
            )


def _own_path(path: Path, own: str, rank: int) -> Path:
    # An item of a list has no name to add to: the key itself becomes one at the top.
    return (*path[:-1], rank_key(path[-1], rank)) if isinstance(path[-1], str) else (own,)


def _kind(item: WriteItem) -> str:
    data = item.tensor_data
    if data is None:
        return "an object"
    what = "shards of a tensor" if item.type == WriteItemType.SHARD else "a tensor"
    return f"{what} of shape {list(data.size)} and {data.properties.dtype}".replace("torch.", "")


def _place(path: Path) -> str:
    return "state" + "".join(f"[{part!r}]" for part in path)


def _two(key: str, one: str, other: str) -> CheckpointError:
    return CheckpointError(f"{key} is {one} and {other}", code="keys.kind", key=key)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}, … ({len(ranks)} in all)" if len(ranks) > 8 else f"ranks {shown}"
