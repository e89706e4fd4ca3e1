"""`CheckedSavePlanner`: a save planner for ``torch.distributed.checkpoint.save`` that compares the ranks.

torch's own planner takes it that what several ranks hold is the same on all of them, and saves one rank's:
of RNG states, positions in the data and counters that differ, all but one are lost without a word, and so
are weights whose replicas have drifted apart. This one lets a digest of everything that other ranks may
hold too travel with the rank's plan. The coordinator holds them against each other before anything is
written, and raises, warns, or gives every rank a key of its own.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Literal, get_args

import torch
from torch import distributed
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.tensor import DTensor

from dcp.errors import CheckpointError, UsageError
from dcp.load.patterns import Pattern, matches_any
from dcp.nested import Path, Places, keys_around, require_distinct
from dcp.rank_keys import split_rank_key
from dcp.save.digests import LIMIT, digest_of, digest_of_record
from dcp.save.files import pickled, require_plain
from dcp.save.shared import (
    Divergence,
    Local,
    dedup,
    divergences,
    require_one_meaning,
    require_tiling,
    to_rank_keys,
)

OnDivergence = Literal["error", "split", "warn"]
_SHOWN = 10


class CheckedSavePlanner(DefaultSavePlanner):
    """Saves as `DefaultSavePlanner` does, after it has compared what the ranks hold.

    Compared are objects, plain tensors, replicated DTensors, and shards of which several ranks may hold
    replicas (as HSDP's ranks do). What only one rank can hold costs nothing.

    A value with a key of its own for every rank is saved under that key: ``rng`` of rank 17 stands under
    ``rng/rank_17``, ``loader.position`` under ``loader.position/rank_17``. ``StrictLoadPlanner(per_rank=
    ["rng"])`` gives each rank its own one back, into ``rng`` of its state, where as many ranks load as saved,
    and refuses where they are others. Ranks count within the whole job, also where only a group of it saves:
    no planner is told of the group.

    What could not be saved is refused before anything is written, and so before a step that is to be replaced
    is touched: objects that cannot be pickled, and shards that are not what their DTensor says of them.

    With ``save(use_collectives=False)`` no rank sees another one's plan, so nothing is compared; all ranks
    but the coordinator warn of that.

    Plans are never cached: torch keeps its cached plans in the class, where checkpointers share them.
    """

    def __init__(
        self,
        on_divergence: OnDivergence = "error",
        per_rank: Iterable[str] = (),
        dedup_save_to_lowest_rank: bool = False,
        *,
        digest_limit: int = LIMIT,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
    ) -> None:
        """
        Args:
            on_divergence: what to do where ranks hold different values under one key: raise an error that
                names all such keys, give each rank a key of its own, or warn and save one rank's. Replicas
                of a shard that differ are an error for ``"split"`` too: a part of a tensor can have no key
                of its own, and which of them is right nobody can say but you. What has another kind, shape
                or dtype on some ranks is an error for ``"warn"`` too: one key cannot stand for both.
            per_rank: globs of flattened keys whose values always get a key for every rank; one that meets a
                dict, as ``rng`` meets ``{"rng": {"python": ..., "torch": ...}}``, means all that is in it.
                Sharded tensors are left as they are. One that meets nothing is warned of.
            dedup_save_to_lowest_rank: let the lowest rank write what several hold; otherwise it is dealt out
                so that all ranks write about the same number of bytes.
            digest_limit: bytes of a value or shard that are hashed, at 10 to 15 GiB a second on one core, and
                as fast as they leave the device. Of larger ones, and of objects of more than 1 MiB beside the
                tensors in them, evenly spaced blocks are compared, so that a small difference can be missed.
            flatten_state_dict: as torch's.
            flatten_sharded_tensors: as torch's.

        Raises:
            UsageError: an argument is not possible.
        """
        super().__init__(
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=flatten_sharded_tensors,
            dedup_save_to_lowest_rank=dedup_save_to_lowest_rank,
        )
        if on_divergence not in get_args(OnDivergence):
            raise UsageError(f"on_divergence is {on_divergence!r}; use error, split or warn")
        if isinstance(per_rank, str):
            raise UsageError(f"per_rank is one text; give a list of globs, such as [{per_rank!r}]")
        if digest_limit < 1:
            raise UsageError(f"digest_limit is {digest_limit}; at least one byte of a value must be compared")
        self.on_divergence: OnDivergence = on_divergence
        self.per_rank = tuple(per_rank)
        self._patterns = tuple(map(Pattern, self.per_rank))
        self.digest_limit = digest_limit

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flatten the state.

        Raises:
            UsageError: two of its places would have one key.
        """
        if self.flatten_state_dict:
            paths: list[Path] = []
            traverse_state_dict(state_dict, lambda path, _: paths.append(path))
            require_distinct(map(Places(state_dict).own, paths))
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """This rank's plan, with digests of what other ranks may hold too.

        Raises:
            UsageError: an object cannot be pickled, or a tensor has no record, see `require_plain`.
            CheckpointError: a shard has another shape than its tensor says.
        """
        for key, value in self.state_dict.items():
            require_plain(key, value, f" on rank {_rank()}" if _ranks() > 1 else "")
        plan = super().create_local_plan()
        self._require_true_shards(plan)
        whole = {
            item.index.fqn
            for item in plan.items
            if item.type != WriteItemType.SHARD or _is_replicated(self.state_dict[item.index.fqn])
        }
        paths = self.mappings if self.flatten_state_dict else {}
        digests: dict[MetadataIndex, bytes] = {}
        for item in plan.items:
            key = item.index.fqn
            record = pickled(self, item) if item.type == WriteItemType.BYTE_IO else None
            if _ranks() == 1 or (key in whole and self._is_per_rank(key, paths)):
                continue
            if _may_be_elsewhere(self.state_dict[key]):
                if record is None:
                    digest = digest_of(self.lookup_object(item.index), self.digest_limit)
                else:
                    digest = digest_of_record(record.getvalue(), self.digest_limit)
                if digest is not None:
                    digests[item.index] = digest
        self.plan = dataclasses.replace(plan, planner_data=Local(_rank(), paths, digests, whole))
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Compare the ranks, then plan as torch does.

        Raises:
            CheckpointError: ranks do not agree on a value, a key or a tensor's chunks.
            UsageError: a key for a rank's own value is taken.
        """
        if len(all_plans) < _ranks() and not self.is_coordinator:
            warnings.warn(
                f"with use_collectives=False nothing is compared between the {_ranks()} ranks: values that "
                "differ between them go unnoticed",
                stacklevel=2,
            )
        told: list[Local] = [plan.planner_data for plan in all_plans]
        apart = {key for local in told for key in local.whole if self._is_per_rank(key, local.paths)}
        self._warn_of_idle(apart, all_plans, told)
        found = divergences(all_plans, told)
        if self.on_divergence == "split":
            apart |= {divergence.key for divergence in found if divergence.box is None}
            found = [divergence for divergence in found if divergence.box is not None]
        if found:
            self._tell(found)
        plans, paths = to_rank_keys(all_plans, told, apart)
        require_one_meaning(plans, paths)
        plans = dedup(plans, self.dedup_save_to_lowest_rank)
        require_tiling(plans, alone=len(plans) < _ranks())
        return super().create_global_plan(
            [
                dataclasses.replace(plan, planner_data=own if self.flatten_state_dict else None)
                for plan, own in zip(plans, paths, strict=True)
            ]
        )

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The value of an item, also of one that the coordinator gave a key of this rank's own."""
        if index.fqn not in self.state_dict:
            own = split_rank_key(index.fqn)
            index = index if own is None else dataclasses.replace(index, fqn=own[0])
        return super().lookup_object(index)

    def _is_per_rank(self, key: str, paths: Mapping[str, Path]) -> bool:
        return _meets(self._patterns, key, paths)

    def _require_true_shards(self, plan: SavePlan) -> None:
        """Every shard is what the index will say of it.

        torch works out from a DTensor's shape, mesh and placements which part a rank has, and does not look.

        Raises:
            CheckpointError: one is not; names all such keys.
        """
        wrong: dict[str, str] = {}
        for item in plan.items:
            key, data = item.index.fqn, item.tensor_data
            # What makes its own items without being a tensor can be looked up only by who knows it.
            if data is None or not isinstance(self.state_dict[key], torch.Tensor):
                continue
            shape = self.lookup_object(item.index).shape
            if shape != data.chunk.sizes:
                wrong[key] = (
                    f"{key}: the shard of rank {_rank()} has shape {list(shape)}, but by its shape, mesh and "
                    f"placements the DTensor has {list(data.chunk.sizes)} there"
                )
        if wrong:
            more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise CheckpointError(
                f"{'; '.join(list(wrong.values())[:_SHOWN])}{more}. Make such a DTensor with "
                "distribute_tensor, or give DTensor.from_local the parts that its placements call for",
                code="keys.shape",
                key=next(iter(wrong)),
            )

    def _warn_of_idle(self, apart: Set[str], plans: Sequence[SavePlan], told: Sequence[Local]) -> None:
        """Patterns of ``per_rank`` that meet no value, which is more likely a slip than meant."""
        paths = {key: path for local in told for key, path in local.paths.items()}
        for pattern in self._patterns:
            if not any(_meets([pattern], key, paths) for key in apart):
                keys = {item.index.fqn for plan in plans for item in plan.items}
                sharded = sorted(key for key in keys if _meets([pattern], key, paths))
                met = f"only sharded tensors, such as {sharded[0]}" if sharded else "no key of the state"
                warnings.warn(
                    f"per_rank pattern {pattern.text!r} meets {met}: nothing is saved per rank for it",
                    stacklevel=3,
                )

    def _tell(self, found: Sequence[Divergence]) -> None:
        keys = "; ".join(map(str, found[:_SHOWN]))
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        if self.on_divergence == "warn":
            warnings.warn(f"only one rank's value is saved: {keys}{more}", stacklevel=2)
            return
        advice: list[str] = []
        whole = [divergence.key for divergence in found if divergence.box is None]
        if whole:
            advice.append(
                f"Save such values under a key for every rank with per_rank={whole[:_SHOWN]} or "
                'on_divergence="split", or make them the same'
            )
        if len(whole) < len(found):
            advice.append(
                "Replicas of a shard have drifted apart: give all of them one rank's content (broadcast it), "
                'or save one of them as it is with on_divergence="warn"'
            )
        raise CheckpointError(
            f"{keys}{more}. {'. '.join(advice)}",
            code="ranks.shared-value",
            key=found[0].key,
            groups={divergence.key: divergence.groups for divergence in found},
        )


def _meets(patterns: Iterable[Pattern], key: str, paths: Mapping[str, Path]) -> bool:
    """Whether one of the globs is that of a key, or of a dict that it stands in."""
    return any(matches_any(patterns, each) for each in (key, *keys_around(paths.get(key, ()))))


def _is_replicated(value: Any) -> bool:
    return isinstance(value, DTensor) and all(place.is_replicate() for place in value.placements)


def _may_be_elsewhere(value: Any) -> bool:
    """Whether other ranks may hold what this one holds of a value, as far as this one can tell."""
    if not isinstance(value, DTensor):
        # What makes its own items without being a tensor can be looked up only by who knows it.
        return isinstance(value, torch.Tensor) or not hasattr(value, "__create_write_items__")
    mesh = value.device_mesh
    # Ranks outside the mesh may have another one with the same tensor on it.
    return mesh.size() < _ranks() or any(
        place.is_replicate() and mesh.size(dim) > 1 for dim, place in enumerate(value.placements)
    )


def _ranks() -> int:
    """Ranks of the job."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _rank() -> int:
    return distributed.get_rank() if _ranks() > 1 else 0
