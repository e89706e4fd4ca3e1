"""Load planners for ``torch.distributed.checkpoint.load`` that compare before they read.

- `StrictLoadPlanner`, for resuming: the checkpoint and the state dict must hold exactly the same.
- `PartialLoadPlanner`, for fine-tuning: what may be absent is named; the checkpoint may hold more.

torch's own planner ignores extra keys, casts dtypes, lets a saved object replace a tensor, leaves gaps as
they are and names only the first missing key. These raise one `dcp.errors.StateMismatchError` that lists
everything, for all ranks, before any data is read. What they did stands in ``report``.
"""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import Field
from torch import distributed
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element, traverse_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from dcp.contract import Expected
from dcp.errors import UsageError
from dcp.findings import Finding, Report, has_errors
from dcp.load.items import fill, items_of, object_item, view_of
from dcp.load.matching import Matched, match, merged, mismatch_error, of_other_ranks, of_rank_keys
from dcp.load.patterns import Pattern, matches_any
from dcp.load.rename import Renamed, Rules, pairs_of, rename
from dcp.load.transforms import Transforms, parse
from dcp.nested import Places, keys_around, require_distinct
from dcp.rank_keys import rank_key, split_rank_key, writers

Order = tuple[int, ...]
_COMPARED = "held against the other ranks"


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank tells the coordinator beside its plan. It travels as ``planner_data``."""

    rank: int
    """Its number in the whole job."""
    findings: Sequence[Finding]
    idle: Sequence[str]
    """Patterns that meet nothing on this rank, in words."""


class LoadReport(Report):
    """What a load did on this rank. Keys are the state dict's unless something else is said.

    Attributes:
        loaded: keys whose values were read whole.
        missing: keys that the checkpoint does not have.
        unexpected: names, after renaming, that only the checkpoint has.
        skipped: keys and names that ``skip`` left alone.
        renamed: the checkpoint's key by the name that ``rename`` gave it, where they differ.
        transformed: what was done to each tensor that is not as it was saved, by its key.
        untouched: keys of the state dict that hold what they held before.
    """

    loaded: list[str] = Field(default_factory=list)
    missing: list[str] = Field(default_factory=list)
    unexpected: list[str] = Field(default_factory=list)
    skipped: list[str] = Field(default_factory=list)
    renamed: dict[str, str] = Field(default_factory=dict)
    transformed: dict[str, list[str]] = Field(default_factory=dict)
    untouched: list[str] = Field(default_factory=list)


class StrictLoadPlanner(DefaultLoadPlanner):
    """Loads a checkpoint only if it holds exactly what the state dicts of all ranks together do: keys, kinds,
    shapes, dtypes.
    """

    def __init__(
        self,
        *,
        rename: Rules | None = None,
        transform: Transforms | None = None,
        skip: Sequence[str] = (),
        per_rank: Sequence[str] = (),
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
    ) -> None:
        """
        Args:
            rename: old to new path components of the checkpoint's keys, see `dcp.load.rename`; a rule that
                meets no key is a warning.
            transform: what to do to tensors on the way in, by pattern of the state dict's names, see
                `dcp.load.transforms`.
            skip: patterns of keys that are neither loaded nor missed.
            per_rank: patterns of keys under which every rank saved a value of its own, as
                `dcp.CheckedSavePlanner` does it: ``rng`` of this rank's state is loaded from ``rng/rank_17``
                on rank 17 of the job, whatever group loads. One that meets a dict means all that is in it.
                On other ranks than saved that is an error, which says so. ``rename`` names the key without
                its rank. The report names such keys as the checkpoint does.
            flatten_state_dict: as torch's planner has it.
            flatten_sharded_tensors: likewise.

        Raises:
            UsageError: a rule or transform makes no sense.
        """
        super().__init__(
            flatten_state_dict=flatten_state_dict, flatten_sharded_tensors=flatten_sharded_tensors
        )
        self._rules = pairs_of(rename)
        self._transforms = parse(transform)
        self._skip = _patterns(skip, "skip")
        self._per_rank = _patterns(per_rank, "per_rank")
        if self._per_rank and not flatten_state_dict:
            raise UsageError("per_rank goes by flattened keys: it needs flatten_state_dict=True")
        self._forget()

    def _forget(self) -> None:
        self._matched = Matched()
        self._renamed = Renamed({}, (), ())
        self._places = Places({})
        self._findings: list[Finding] = []
        self._orders: dict[ReadItem, Order] = {}
        self._left: Counter[str] = Counter()

    @property
    def report(self) -> LoadReport:
        """What was loaded so far, and what was not."""
        matched = self._matched
        planned = [*matched.tensors, *matched.objects]
        loaded = [key for key in planned if not self._left[key]]
        done = set(loaded)
        return LoadReport(
            loaded=loaded,
            missing=matched.missing,
            unexpected=matched.unexpected,
            skipped=matched.skipped,
            renamed={name: key for name, key in self._renamed.sources.items() if name != key},
            transformed={key: list(made.steps) for key, made in matched.tensors.items() if made.steps},
            untouched=[key for key in self.state_dict if key not in done],
        )

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Flatten the state.

        Raises:
            UsageError: two of its places would have one key, or tensors have no memory yet.
        """
        self._forget()
        self._places = Places(state_dict)
        paths = _paths_of(state_dict) if self.flatten_state_dict else [(name,) for name in state_dict]
        require_distinct(map(self._places.own, paths))
        _require_memory(state_dict)
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self._take_own()

    def create_local_plan(self) -> LoadPlan:
        """This rank's reads. What does not fit travels along, to be told of all ranks at once."""
        assert self.metadata is not None
        saved = {key: _saved(value) for key, value in self.metadata.state_dict_metadata.items()}
        self._renamed = rename(saved, self._rules)
        self._spell_as_saved()
        matched = self._matched = match(
            {key: _wanted(value) for key, value in self.state_dict.items()},
            saved,
            self._renamed,
            self._transforms,
            skip=self._skip,
            may_be_missing=self._may_be_missing,
            extra_allowed=self._extra_allowed,
        )
        self._warn()
        self._findings = list(matched.findings)
        items: list[ReadItem] = []
        for key, assembly in matched.tensors.items():
            plan = items_of(key, self.state_dict[key], assembly, self.metadata)
            items += plan.items
            self._orders |= plan.orders
            self._findings += plan.findings
        items += [object_item(key, source) for key, source in matched.objects.items()]
        self._left = Counter(item.dest_index.fqn for item in items)
        return LoadPlan(items, planner_data=Told(_rank(), self._findings, self._idle(saved)))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are.

        Raises:
            StateMismatchError: on any rank the checkpoint does not fit the state dict.
        """
        told: list[Told] = [plan.planner_data or Told(rank, (), ()) for rank, plan in enumerate(global_plan)]
        ranks = [each.rank for each in told]
        found = merged([(each.rank, each.findings) for each in told])
        saved_by = writers(self._renamed.sources)
        self._refuse([*found, *of_rank_keys(found, saved_by), *of_other_ranks(found, saved_by, ranks)])
        for text in told[0].idle:
            if all(text in each.idle for each in told):
                warnings.warn(text, stacklevel=2)
        complete = all(plan.planner_data is not None for plan in global_plan)
        return [replace(plan, planner_data=_COMPARED if complete else None) for plan in global_plan]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        # A storage reader may have made plans of its own, without what travelled along.
        if new_plan.planner_data != _COMPARED:
            self._refuse(self._findings)
        for key, assembly in self._matched.tensors.items():
            fill(self.state_dict[key], assembly)
            self._left[key] += 0
        return new_plan

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        order = self._orders.get(read_item)
        if order is None:
            resolved: torch.Tensor = super().resolve_tensor(read_item)
            return resolved
        return view_of(self.lookup_tensor(read_item.dest_index), read_item, order)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._left[read_item.dest_index.fqn] -= 1

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object where the state has it; torch's own would name its place anew, and in a copy."""
        key = read_item.dest_index.fqn
        path = self.mappings[key] if self.flatten_state_dict else (key,)
        loaded = torch.load(value, weights_only=False)
        if not self._places.put(self._places.own(path), loaded):
            set_element(self.original_state_dict, path, loaded)
        self._left[key] -= 1

    _extra_allowed = False
    _allowed: tuple[Pattern, ...] = ()

    def _may_be_missing(self, key: str) -> bool:
        return False

    def _refuse(self, findings: Sequence[Finding]) -> None:
        if has_errors(findings):
            raise mismatch_error(findings)

    def _spell_as_saved(self) -> None:
        """Flatten the state dict as torch 2.3 and older did, if more of the checkpoint's keys fit then."""
        names = self._renamed.sources.keys()
        if not self.flatten_state_dict or names <= self.state_dict.keys():
            return
        before = _version._derived_version
        _version._derived_version = "2_3"
        try:
            old, mappings = flatten_state_dict(self.original_state_dict)
        finally:
            _version._derived_version = before
        if len(names & old.keys()) > len(names & self.state_dict.keys()):
            self.state_dict, self.mappings = old, mappings
            self._take_own()

    def _take_own(self) -> None:
        """Name what every rank has of its own as this rank saved it; its place in the state is the same."""
        rank = _rank()
        own = {
            key: rank_key(key, rank)
            for key in self.state_dict
            if any(matches_any(self._per_rank, each) for each in self._around(key))
        }
        if not own:
            return
        self.state_dict = {own.get(key, key): value for key, value in self.state_dict.items()}
        self.mappings = {own.get(key, key): path for key, path in self.mappings.items()}

    def _around(self, key: str) -> tuple[str, ...]:
        """A key and those of the dicts that it stands in."""
        return (key, *keys_around(self.mappings[key])) if self.flatten_state_dict else (key,)

    def _idle(self, saved: Iterable[str]) -> list[str]:
        """Patterns that meet nothing here, in words."""
        keys = [own[0] if (own := split_rank_key(key)) else key for key in self.state_dict]
        keys += [each for key in self.state_dict for each in self._around(key)]
        met = {
            "skip": (self._skip, [*self.state_dict, *self._renamed.sources, *saved]),
            "per_rank": (self._per_rank, keys),
            "allow_missing": (self._allowed, [*self.state_dict]),
        }
        return [
            f"{argument} pattern {pattern.text!r} matches no key"
            for argument, (patterns, names) in met.items()
            for pattern in patterns
            if not any(pattern.match(name) is not None for name in names)
        ]

    def _warn(self) -> None:
        for rule in self._renamed.idle:
            warnings.warn(f"rename rule {rule} matches no key of the checkpoint", stacklevel=3)
        for text in self._matched.idle:
            warnings.warn(f"transform {text!r} matches no tensor", stacklevel=3)


class PartialLoadPlanner(StrictLoadPlanner):
    """Loads what the checkpoint and the state dict have in common.

    A key of the state dict that the checkpoint lacks must match ``allow_missing``, or nothing is loaded. More
    in the checkpoint is no fault. Shapes, dtypes and kinds of what both have must agree.
    """

    def __init__(
        self,
        allow_missing: Sequence[str] = (),
        *,
        rename: Rules | None = None,
        transform: Transforms | None = None,
        skip: Sequence[str] = (),
        per_rank: Sequence[str] = (),
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
    ) -> None:
        """
        Args:
            allow_missing: patterns of keys that may be absent and then stay as they are, e.g. ``"head.*"``.

        The others are those of `StrictLoadPlanner`.
        """
        super().__init__(
            rename=rename,
            transform=transform,
            skip=skip,
            per_rank=per_rank,
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=flatten_sharded_tensors,
        )
        self._allowed = _patterns(allow_missing, "allow_missing")

    _extra_allowed = True

    def _may_be_missing(self, key: str) -> bool:
        return matches_any(self._allowed, key)


def _paths_of(state: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Where everything stands that torch flattens the state to."""
    paths: list[tuple[Any, ...]] = []
    traverse_state_dict(state, lambda path, _: paths.append(path))
    return paths


def _rank() -> int:
    """This process's number in the job."""
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _require_memory(state: dict[str, Any]) -> None:
    """No tensor without memory where there is no process group, which torch would ask for the device.

    Raises:
        UsageError: there is one.
    """
    if distributed.is_available() and distributed.is_initialized():
        return
    empty: list[str] = []

    def look(path: tuple[Any, ...], value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.is_meta:
            empty.append(".".join(map(str, path)))

    traverse_state_dict(state, look)
    if empty:
        which = f"{empty[0]} is" if len(empty) == 1 else f"{empty[0]} and {len(empty) - 1} more are"
        raise UsageError(
            f"{which} on the meta device, without memory to load into: make it with "
            "model.to_empty(device=...) before the state dict is taken, or initialise a process group, whose "
            "device torch takes then"
        )


def _patterns(texts: Sequence[str], argument: str) -> tuple[Pattern, ...]:
    if isinstance(texts, str):
        raise UsageError(f"{argument} is a list of patterns, e.g. [{texts!r}]")
    return tuple(map(Pattern, texts))


def _wanted(value: Any) -> Expected:
    if isinstance(value, torch.Tensor) or hasattr(value, "__create_chunk_list__"):
        return Expected(kind="tensor", shape=tuple(value.size()), dtype=_name(value.dtype))
    return Expected(kind="bytes")


def _saved(value: Any) -> Expected:
    if isinstance(value, TensorStorageMetadata):
        return Expected(kind="tensor", shape=tuple(value.size), dtype=_name(value.properties.dtype))
    return Expected(kind="bytes")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
