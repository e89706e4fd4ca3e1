"""Layouts: how ranks share the tensors of a checkpoint, from text such as ``"fsdp=2,tp=2"``.

A `Layout` is a device mesh with up to two axes, ``fsdp`` outside and ``tp`` inside, numbered row by
row: rank = fsdp index * tp size + tp index, as ``init_device_mesh`` numbers them. `Layout.boxes` gives
the region of a tensor that each rank holds, exactly as DTensor shards it. Pure geometry, no torch.

Placements: ``fsdp`` shards dimension 0 of every tensor that has one, as ``fully_shard`` does. ``tp`` shards
what its rules say (`dcp.tp_rules`). Without rules it shards dimension 1 of tensors that have one and keeps
the others whole on each of its ranks, as row-parallel linear layers and their norms and biases are kept. A
scalar is whole on every rank.

Where both shard dimension 0, tp comes first and fsdp divides what is left on a tp rank: so ``fully_shard``
does after ``parallelize_module``, and DTensor calls it ``_StridedShard``. DTensor works out those shards in
another way, which for some uneven sizes gives others than the ranks hold; torch can neither save nor load
these, and `Layout.boxes` refuses them.

A dimension of n elements is split over N ranks as ``torch.chunk`` splits it: ceil(n / N) elements a
rank, the last ones possibly fewer or none; an empty shard has size 0 and stands at offset n.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from dcp.boxes import Box, Shape
from dcp.errors import UsageError
from dcp.tp_rules import TpRules

AXES = ("fsdp", "tp")
"""Axis names, outermost first."""

MAX_RANKS = 1024

_PART = re.compile(r"\s*(\w+)\s*=\s*(\d+)\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh of ranks. ``str(layout)`` is the text that parses back to it."""

    fsdp: int | None = None
    """Ranks along the fsdp axis; None if the mesh has no such axis."""
    tp: int | None = None
    """Ranks along the tp axis; None if the mesh has no such axis."""
    rules: TpRules | None = None
    """What the tp axis shards; no part of the text."""

    def __post_init__(self) -> None:
        if not self.axes:
            raise UsageError(f"a layout needs at least one of {' and '.join(AXES)}, e.g. fsdp=2")
        if any(size < 1 for _, size in self.axes) or self.ranks > MAX_RANKS:
            raise UsageError(f"layout {self} has {self.ranks} ranks; 1 to {MAX_RANKS} are allowed")

    @classmethod
    def parse_all(cls, texts: Sequence[str], rules: TpRules | None = None) -> list[Layout]:
        """Several, as `parse` reads each.

        Raises:
            UsageError: one is not understood, or it is one text and no list.
        """
        if isinstance(texts, str):
            raise UsageError(f"layouts is one text; give a list of layouts, e.g. [{texts!r}]")
        return [cls.parse(text, rules) for text in texts]

    @classmethod
    def parse(cls, text: str, rules: TpRules | None = None) -> Layout:
        """Read ``"fsdp=2"``, ``"tp=4"`` or ``"fsdp=2,tp=2"`` (in either order, spaces allowed).

        Args:
            text: the layout.
            rules: what its tp axis shards.

        Raises:
            UsageError: anything else; the message quotes the text and says what is allowed.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            match = _PART.fullmatch(part)
            if not match or match[1] not in AXES or len(match[2]) > len(str(MAX_RANKS)):
                raise _unreadable(text)
            if match[1] in sizes:
                raise UsageError(f"layout {text!r} names {match[1]} twice")
            sizes[match[1]] = int(match[2])
        return cls(sizes.get("fsdp"), sizes.get("tp"), rules)

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """(name, ranks) of each axis of the mesh, outermost first."""
        both = ((name, getattr(self, name)) for name in AXES)
        return tuple((name, size) for name, size in both if size is not None)

    @property
    def ranks(self) -> int:
        """Number of ranks of the mesh."""
        return prod(size for _, size in self.axes)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    def shard_dims(self, shape: Shape, key: str = "") -> tuple[int | None, ...]:
        """For each axis, outermost first, the dimension of a tensor it shards; None where it replicates.

        Args:
            shape: the tensor's, in elements.
            key: the tensor's, for rules to match.

        Raises:
            UsageError: a rule names a dimension that the tensor does not have.
        """
        return tuple(self._dim(name, shape, key) for name, _ in self.axes)

    def _dim(self, axis: str, shape: Shape, key: str) -> int | None:
        if axis == "tp" and self.rules is not None:
            return self.rules.dim(key, shape)
        dim = AXES.index(axis)
        return dim if dim < len(shape) else None

    def split_factor(self, shape: Shape, key: str = "") -> int:
        """Into how many parts tp divides the dimension before fsdp does; 1 where it is another one."""
        dims = self.shard_dims(shape, key)
        both = len(dims) == len(AXES) and dims[0] == dims[1] and dims[0] is not None
        return (self.tp or 1) if both else 1

    def boxes(self, shape: Shape, key: str = "") -> tuple[Box, ...]:
        """The region of a tensor of ``shape`` (sizes in elements) that each rank holds, by rank.

        Args:
            shape: the tensor's.
            key: the tensor's, for rules to match.

        Raises:
            UsageError: a rule names a dimension that the tensor does not have, or the shards are uneven
                ones that torch cannot express.
        """
        self.require_fit(shape, key)
        return tuple(self._boxes(shape, self.shard_dims(shape, key)))

    def require_fit(self, shape: Shape, key: str = "") -> None:
        """Refuse a tensor that the ranks cannot hold, as `boxes` does."""
        if self.split_factor(shape, key) > 1:
            self._require_expressible(shape, key)

    def _boxes(self, shape: Shape, dims: Sequence[int | None]) -> Iterator[Box]:
        sizes = [size for _, size in self.axes]
        for place in product(*map(range, sizes)):
            offsets = [0] * len(shape)
            lengths = list(shape)
            # The innermost axis first: what tp leaves is what fsdp divides.
            for dim, size, index in reversed(list(zip(dims, sizes, place, strict=True))):
                if dim is not None:
                    offset, length = shard(lengths[dim], size, index)
                    # An empty shard stands at the end of the tensor, whatever it was cut from.
                    offsets[dim] = offsets[dim] + offset if length else shape[dim]
                    lengths[dim] = length
            yield Box(tuple(offsets), tuple(lengths))

    def _require_expressible(self, shape: Shape, key: str) -> None:
        """Refuse uneven shards of which DTensor's own arithmetic gives other sizes than the ranks hold."""
        fsdp, tp = self.fsdp or 1, self.tp or 1
        left = [shard(shape[0], tp, index)[1] for index in range(tp)]
        for number in range(fsdp):
            held = [shard(length, fsdp, number)[1] for length in left]
            if held != [shard(sum(held), tp, index)[1] for index in range(tp)]:
                raise UsageError(
                    f"{self} cannot hold {key or 'a tensor'} of {shape[0]} rows: divided by tp and then by "
                    "fsdp, its shards are uneven in a way that torch's DTensor works out differently from "
                    "what the ranks hold, so that torch itself could neither save nor load them. Choose "
                    f"sizes that divide it, or a tp rule that shards another dimension of {key or 'it'}"
                )


def shard(length: int, parts: int, index: int) -> tuple[int, int]:
    """(offset, size) in elements of part ``index`` of a dimension of ``length``, as DTensor splits it."""
    step = -(-length // parts)
    offset = min(step * index, length)
    return offset, min(step, length - offset)


def _unreadable(text: str) -> UsageError:
    return UsageError(
        f"layout {text!r} is not understood: give fsdp=N, tp=N or fsdp=N,tp=M with whole numbers, "
        f"at most {MAX_RANKS} ranks in all"
    )
