"""Layouts: how ranks share the tensors of a checkpoint, from text such as ``"fsdp=2,tp=2"``.

A `Layout` is a device mesh with up to two axes, ``fsdp`` outside and ``tp`` inside, numbered row by
row: rank = fsdp index * tp size + tp index, as ``init_device_mesh`` numbers them. `Layout.boxes` gives
the region of a tensor that each rank holds, exactly as DTensor shards it. Pure geometry, no torch.

Placements: ``fsdp`` shards dimension 0 of every tensor that has one, as ``fully_shard`` does. ``tp``
shards dimension 1 of tensors that have one and keeps the others whole on each of its ranks, as
row-parallel linear layers and their norms and biases are kept. The two never shard the same dimension,
so no strided sharding arises. A scalar is whole on every rank.

A dimension of n elements is split over N ranks as ``torch.chunk`` splits it: ceil(n / N) elements a
rank, the last ones possibly fewer or none; an empty shard has size 0 and stands at offset n.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from dcp.boxes import Box, Shape
from dcp.errors import UsageError

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

    def __post_init__(self) -> None:
        if not self.axes:
            raise UsageError(f"a layout needs at least one of {' and '.join(AXES)}, e.g. fsdp=2")
        if any(size < 1 for _, size in self.axes) or self.ranks > MAX_RANKS:
            raise UsageError(f"layout {self} has {self.ranks} ranks; 1 to {MAX_RANKS} are allowed")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read ``"fsdp=2"``, ``"tp=4"`` or ``"fsdp=2,tp=2"`` (in either order, spaces allowed).

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
        return cls(**sizes)

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

    def shard_dims(self, shape: Shape) -> tuple[int | None, ...]:
        """For each axis, outermost first, the dimension of ``shape`` it shards; None where it replicates."""
        dims = (AXES.index(name) for name, _ in self.axes)
        return tuple(dim if dim < len(shape) else None for dim in dims)

    def boxes(self, shape: Shape) -> tuple[Box, ...]:
        """The region of a tensor of ``shape`` (sizes in elements) that each rank holds, by rank."""
        return tuple(self._boxes(shape))

    def _boxes(self, shape: Shape) -> Iterator[Box]:
        dims = self.shard_dims(shape)
        sizes = [size for _, size in self.axes]
        for place in product(*map(range, sizes)):
            offsets = [0] * len(shape)
            lengths = list(shape)
            for dim, size, index in zip(dims, sizes, place, strict=True):
                if dim is not None:
                    offsets[dim], lengths[dim] = shard(shape[dim], size, index)
            yield Box(tuple(offsets), tuple(lengths))


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
