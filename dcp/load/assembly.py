"""What a tensor is put together from: regions of saved tensors, turned and placed, and constant filling.

An `Assembly` is a tensor that does not exist yet. Transposing, splitting, joining, padding and casting only
move its `Part`s about, so a rank reads the bytes of its own shard and nothing more, whatever was done to the
whole. Pure geometry, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dcp.boxes import Box, Shape, intersect, whole
from dcp.errors import CheckpointError
from dcp.load.regions import moved


@dataclass(frozen=True, slots=True)
class Part:
    """A region that comes from one saved tensor."""

    source: str
    """The saved tensor's key."""
    box: Box
    """The region, in elements from the assembly's origin."""
    origin: Shape
    """Where the region begins in the saved tensor, in its own order of dimensions."""
    order: tuple[int, ...]
    """For each dimension of the assembly, the saved tensor's dimension that lies along it."""

    def within(self, region: Box) -> tuple[Box, Box] | None:
        """(what it has of ``region``, the same in the saved tensor's elements and order), if anything."""
        common = intersect(self.box, region)
        if common is None:
            return None
        local = common.shifted(self.box.offsets)
        offsets, sizes = list(self.origin), [0] * len(self.origin)
        for dim, saved in enumerate(self.order):
            offsets[saved] += local.offsets[dim]
            sizes[saved] = local.sizes[dim]
        return common, Box(tuple(offsets), tuple(sizes))


@dataclass(frozen=True, slots=True)
class Fill:
    """A region that is filled with one value."""

    box: Box
    value: float


@dataclass(frozen=True, slots=True)
class Assembly:
    """A tensor to be made. ``dtype`` by torch's name, such as ``"bfloat16"``."""

    shape: Shape
    dtype: str
    parts: tuple[Part, ...]
    fills: tuple[Fill, ...] = ()
    steps: tuple[str, ...] = ()
    """What was done to it, in words."""

    @classmethod
    def of(cls, source: str, shape: Shape, dtype: str) -> Assembly:
        """A saved tensor as it is."""
        order = tuple(range(len(shape)))
        return cls(shape, dtype, (Part(source, whole(shape), (0,) * len(shape), order),))

    @property
    def sources(self) -> tuple[str, ...]:
        """Keys of the saved tensors it is made from."""
        return tuple(dict.fromkeys(part.source for part in self.parts))

    def cast(self, dtype: str) -> Assembly:
        """The same in another dtype."""
        return self._done(f"cast from {self.dtype} to {dtype}", dtype=dtype)

    def transposed(self, first: int, second: int) -> Assembly:
        """Two dimensions exchanged.

        Raises:
            CheckpointError: ``keys.shape``; there is no such dimension. So for all that follow.
        """
        first, second = self.require_dim(first, "transpose"), self.require_dim(second, "transpose")

        def swap(values: tuple[int, ...]) -> tuple[int, ...]:
            swapped = list(values)
            swapped[first], swapped[second] = values[second], values[first]
            return tuple(swapped)

        def turn(box: Box) -> Box:
            return Box(swap(box.offsets), swap(box.sizes))

        return self._done(
            f"transposed {first} and {second}",
            shape=swap(self.shape),
            parts=tuple(replace(part, box=turn(part.box), order=swap(part.order)) for part in self.parts),
            fills=tuple(Fill(turn(fill.box), fill.value) for fill in self.fills),
        )

    def pieces(self, dim: int, sizes: Sequence[int]) -> list[Assembly]:
        """Cut along ``dim`` into pieces of ``sizes`` elements, which together must be all of it."""
        dim = self.require_dim(dim, "split")
        if sum(sizes) != self.shape[dim]:
            raise self._impossible(f"split along {dim} into {list(sizes)}")
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        return [self._piece(dim, start, size) for start, size in zip(starts, sizes, strict=True)]

    def _piece(self, dim: int, start: int, size: int) -> Assembly:
        def at(values: Shape, value: int) -> Shape:
            return (*values[:dim], value, *values[dim + 1 :])

        region = Box(at((0,) * len(self.shape), start), at(self.shape, size))
        parts = []
        for part in self.parts:
            found = part.within(region)
            if found is not None:
                box, saved = found
                parts.append(replace(part, box=box.shifted(region.offsets), origin=saved.offsets))
        fills = [
            Fill(common.shifted(region.offsets), fill.value)
            for fill in self.fills
            if (common := intersect(fill.box, region)) is not None
        ]
        return self._done(
            f"elements {start} to {start + size} of dimension {dim} of {' and '.join(self.sources)}",
            shape=region.sizes,
            parts=tuple(parts),
            fills=tuple(fills),
        )

    def padded(self, dim: int, size: int, value: float) -> Assembly:
        """Filled up with ``value`` at the end of ``dim``, to ``size`` elements."""
        dim = self.require_dim(dim, "pad")
        have = self.shape[dim]
        if size < have:
            raise self._impossible(f"pad dimension {dim} to {size}")
        if size == have:
            return self
        lack = Box(
            tuple(have if d == dim else 0 for d in range(len(self.shape))),
            tuple(size - have if d == dim else n for d, n in enumerate(self.shape)),
        )
        return self._done(
            f"padded dimension {dim} from {have} to {size} with {value}",
            shape=tuple(size if d == dim else n for d, n in enumerate(self.shape)),
            fills=(*self.fills, Fill(lack, value)),
        )

    @classmethod
    def joined(cls, dim: int, members: Sequence[tuple[str, Assembly]]) -> Assembly:
        """One after the other along ``dim``; dtypes and other dimensions must be alike.

        Args:
            members: each with the name that the join has for it.
        """
        first = members[0][1]
        dim = first.require_dim(dim, "join")
        if any(
            len(m.shape) != len(first.shape)
            or any(a != b for d, (a, b) in enumerate(zip(m.shape, first.shape, strict=True)) if d != dim)
            for _, m in members
        ):
            shapes = " and ".join(f"{name} {list(m.shape)}" for name, m in members)
            raise CheckpointError(
                f"cannot join along {dim} {shapes}: they must be alike in all other dimensions",
                code="keys.shape",
            )
        if any(m.dtype != first.dtype for _, m in members):
            types = " and ".join(f"{name} ({m.dtype})" for name, m in members)
            raise CheckpointError(
                f"cannot join {types}: they are of several dtypes, so cast them first, by rules that stand "
                "before the join's",
                code="keys.dtype",
            )
        parts: list[Part] = []
        fills: list[Fill] = []
        start = 0
        for _, member in members:
            place = tuple(start if d == dim else 0 for d in range(len(first.shape)))
            parts += [replace(part, box=moved(part.box, place)) for part in member.parts]
            fills += [Fill(moved(fill.box, place), fill.value) for fill in member.fills]
            start += member.shape[dim]
        shape = tuple(start if d == dim else n for d, n in enumerate(first.shape))
        sources = " and ".join(source for _, member in members for source in member.sources)
        steps = (
            *dict.fromkeys(step for _, member in members for step in member.steps),
            f"joined {sources} along {dim}",
        )
        return cls(shape, first.dtype, tuple(parts), tuple(fills), steps)

    def _done(self, step: str, **changes: object) -> Assembly:
        return replace(self, steps=(*self.steps, step), **changes)  # type: ignore[arg-type]

    def require_dim(self, dim: int, verb: str) -> int:
        """The dimension, counted from the first.

        Raises:
            CheckpointError: ``keys.shape``; there is none.
        """
        if not -len(self.shape) <= dim < len(self.shape):
            raise self._impossible(f"{verb} along dimension {dim}")
        return dim % len(self.shape)

    def _impossible(self, what: str) -> CheckpointError:
        names = " and ".join(self.sources)
        return CheckpointError(
            f"cannot {what}: {names} has shape {list(self.shape)} there",
            code="keys.shape",
            key=self.sources[0] if self.sources else None,
            actual=list(self.shape),
        )
