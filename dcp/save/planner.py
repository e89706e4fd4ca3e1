"""`CheckedSavePlanner`: a save planner for ``torch.distributed.checkpoint.save`` that compares the ranks.

torch's own planner takes it that what is not sharded is the same on all ranks, and saves one rank's: of
RNG states, positions in the data and counters that differ, all but one are lost without a word. This one
lets a digest of every such value travel with the rank's plan. The coordinator holds them against each
other before anything is written, and raises, warns, or gives every rank a key of its own.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from torch import distributed
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from dcp.errors import CheckpointError, UsageError
from dcp.save.digests import LIMIT, digest_of
from dcp.save.shared import (
    Divergence,
    Local,
    Path,
    divergences,
    is_whole,
    rank_key,
    require_distinct,
    require_one_meaning,
    require_tiling,
    to_rank_keys,
)

OnDivergence = Literal["error", "split", "warn"]
_SHOWN = 10


class CheckedSavePlanner(DefaultSavePlanner):
    """Saves as `DefaultSavePlanner` does, after it has compared what the ranks hold.

    A value with a key of its own for every rank is loaded under that key: ``rng`` of rank 17 stands under
    ``rng/rank_17``. Ranks count within the group that saves. Plans are never cached: torch keeps its cached
    plans in the class, where checkpointers share them.
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
                names all such keys, give each rank a key of its own, or warn and save one rank's.
            per_rank: globs of flattened keys whose values always get a key for every rank. Sharded tensors
                are left as they are.
            dedup_save_to_lowest_rank: let the lowest rank write what several hold; otherwise the rank with
                the fewest bytes to write so far.
            digest_limit: bytes of a value that are hashed. Of larger ones evenly spaced blocks are compared,
                so that a small difference between them can be missed.
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
            require_distinct(paths)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """This rank's plan, with digests of what it holds whole."""
        plan = super().create_local_plan()
        digests = {
            item.index.fqn: digest_of(self.state_dict[item.index.fqn], self.digest_limit)
            for item in plan.items
            if is_whole(item) and not self._is_per_rank(item.index.fqn)
        }
        paths = self.mappings if self.flatten_state_dict else {}
        self.plan = dataclasses.replace(plan, planner_data=Local(paths, digests))
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Compare the ranks, then plan as torch does.

        Raises:
            CheckpointError: ranks do not agree on a value, a key or a tensor's chunks.
            UsageError: a key for a rank's own value is taken.
        """
        told: list[Local] = [plan.planner_data for plan in all_plans]
        apart = {
            item.index.fqn
            for plan in all_plans
            for item in plan.items
            if is_whole(item) and self._is_per_rank(item.index.fqn)
        }
        found = divergences(all_plans, told)
        if found and self.on_divergence == "split":
            apart |= {divergence.key for divergence in found}
        elif found:
            self._tell(found)
        plans, paths = to_rank_keys(all_plans, told, apart, _numbers(len(all_plans)))
        require_one_meaning(plans, paths)
        require_tiling(self._dedup_save_plans(plans))
        return super().create_global_plan(
            [
                dataclasses.replace(plan, planner_data=own if self.flatten_state_dict else None)
                for plan, own in zip(plans, paths, strict=True)
            ]
        )

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The value of an item, also of one that the coordinator gave a key of this rank's own."""
        if index.fqn not in self.state_dict:
            index = dataclasses.replace(index, fqn=index.fqn.rpartition(rank_key("", 0)[:-1])[0])
        return super().lookup_object(index)

    def _is_per_rank(self, key: str) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in self.per_rank)

    def _tell(self, found: Sequence[Divergence]) -> None:
        keys = "; ".join(map(str, found[:_SHOWN]))
        more = f"; and {len(found) - _SHOWN} more keys" if len(found) > _SHOWN else ""
        if self.on_divergence == "warn":
            warnings.warn(f"only one rank's value is saved: {keys}{more}", stacklevel=2)
            return
        raise CheckpointError(
            f"{keys}{more}. Save such values under a key for every rank with per_rank=[{found[0].key!r}] or "
            'on_divergence="split", or make them the same',
            code="ranks.shared-value",
            key=found[0].key,
            groups={divergence.key: divergence.groups for divergence in found},
        )


def _numbers(plans: int) -> Sequence[int]:
    """The rank of each plan: its place, except that a rank which plans alone still has its own number."""
    if plans == 1 and distributed.is_available() and distributed.is_initialized():
        return [distributed.get_rank()]
    return range(plans)
