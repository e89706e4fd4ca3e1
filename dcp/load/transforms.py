"""What may be done to saved tensors on their way into other ones: cast, transpose, split, join, pad.

A load planner takes them by pattern: ``transform={"*.weight": cast(torch.bfloat16), "*.proj": [transpose(),
pad(0, 50304)]}``. Patterns and names are the state dict's, that is those after renaming. The patterns are
taken in order, and so is a pattern's list; `join` makes new names and can only stand first in a list.
Where a transform is impossible (no such dimension, sizes that do not fit), that is a finding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcp.boxes import Shape
from dcp.dtypes import ITEMSIZE
from dcp.errors import CheckpointError, UsageError
from dcp.findings import Finding
from dcp.load.assembly import Assembly
from dcp.load.patterns import Pattern


@dataclass(frozen=True, slots=True)
class Cast:
    """See `cast`."""

    dtype: str


@dataclass(frozen=True, slots=True)
class Transpose:
    """See `transpose`."""

    first: int
    second: int


@dataclass(frozen=True, slots=True)
class Split:
    """See `split`."""

    dim: int
    into: tuple[Pattern, ...]
    sizes: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Join:
    """See `join`."""

    dim: int
    sources: tuple[Pattern, ...]


@dataclass(frozen=True, slots=True)
class Pad:
    """See `pad`."""

    dim: int
    size: int
    value: float


Transform = Cast | Transpose | Split | Join | Pad


def cast(dtype: Any) -> Cast:
    """Convert to a dtype, given as torch's or by its name, such as ``"bfloat16"``.

    Raises:
        UsageError: there is no such dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise UsageError(f"there is no dtype {dtype!r} to cast to; give one such as torch.bfloat16")
    return Cast(name)


def transpose(first: int = 0, second: int = 1) -> Transpose:
    """Exchange two dimensions."""
    return Transpose(first, second)


def split(dim: int, into: Sequence[str], *, sizes: Sequence[int] | None = None) -> Split:
    """Cut a fused saved tensor along ``dim`` into several of the state dict's.

    Args:
        dim: the dimension to cut.
        into: names of the pieces in order; a star stands for what the pattern's star met.
        sizes: elements of each piece along ``dim``; as the state dict's tensors have them if left out.

    Raises:
        UsageError: no names, or as many sizes as there are not names.
    """
    if not into or isinstance(into, str) or (sizes is not None and len(sizes) != len(into)):
        raise UsageError("split needs a list of names to split into, and a size for each if sizes are given")
    return Split(dim, tuple(map(Pattern, into)), None if sizes is None else tuple(sizes))


def join(dim: int, sources: Sequence[str]) -> Join:
    """Put saved tensors one after the other along ``dim`` into the state dict's one that the pattern names.

    Args:
        dim: the dimension along which they follow each other.
        sources: their names in order; a star stands for what the pattern's star met.

    Raises:
        UsageError: no names.
    """
    if not sources or isinstance(sources, str):
        raise UsageError("join needs a list of names to join")
    return Join(dim, tuple(map(Pattern, sources)))


def pad(dim: int, size: int, value: float = 0.0) -> Pad:
    """Fill up the end of ``dim`` with ``value`` to ``size`` elements, as for a larger vocabulary."""
    return Pad(dim, size, value)


Transforms = Mapping[str, Transform | Sequence[Transform]]
"""What is to be done, by pattern."""


def parse(transforms: Transforms | None) -> tuple[tuple[Pattern, tuple[Transform, ...]], ...]:
    """The transforms in order.

    Raises:
        UsageError: something is no transform, a join does not stand first, or names have another number of
            stars than their pattern.
    """
    table: object = transforms
    if table is not None and not isinstance(table, Mapping):
        raise UsageError(
            f"transform is {transforms!r}; give what to do by pattern, e.g. {{'*.weight': cast('bfloat16')}}"
        )
    parsed = []
    for text, given in (transforms or {}).items():
        several: object = given
        if isinstance(several, str):
            raise UsageError(f"transform {text!r}: {several!r} is a name; use cast({several!r}) or the like")
        steps = tuple(given) if isinstance(given, Sequence) else (given,)
        for number, step in enumerate(steps):
            if not isinstance(step, Transform):
                raise UsageError(
                    f"transform {text!r}: {step!r} is none; use cast, transpose, split, join or pad, such as "
                    "cast('bfloat16')"
                )
            if isinstance(step, Join) and number:
                raise UsageError(f"transform {text!r}: join makes the tensor, so it must stand first")
            for partner in _names(step):
                # As many stars as the pattern has, or it cannot be said what each stands for.
                partner.expand("*" * (text.count("*") + text.count("?")))
        parsed.append((Pattern(text), steps))
    return tuple(parsed)


def _names(step: Transform) -> tuple[Pattern, ...]:
    """The names that a split or a join speaks of."""
    if isinstance(step, Split):
        return step.into
    return step.sources if isinstance(step, Join) else ()


@dataclass(slots=True)
class Arrangement:
    """Tensors by name, changed in place by transforms.

    Attributes:
        tensors: what there is, by the state dict's names.
        wanted: shapes that the state dict's tensors have.
        findings: what could not be done.
        spoilt: names whose transforms failed, of which nothing more needs to be said.
        unmade: what could not be joined because something is absent, and why.
        consumed: what was joined into others and goes by its own name no more; further joins may use it.
        idle: patterns that met no key.
    """

    tensors: dict[str, Assembly]
    wanted: Mapping[str, Shape]
    findings: list[Finding] = field(default_factory=list)
    spoilt: set[str] = field(default_factory=set)
    unmade: dict[str, str] = field(default_factory=dict)
    consumed: dict[str, Assembly] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)

    def apply(self, transforms: Sequence[tuple[Pattern, Sequence[Transform]]]) -> None:
        """Do all of it, in order."""
        for pattern, steps in transforms:
            joins = bool(steps) and isinstance(steps[0], Join)
            met = list(self._matches(pattern, self.wanted if joins else self.tensors))
            if not met:
                self.idle.append(pattern.text)
            for name, stars in met:
                self._run(name, stars, steps)

    def _matches(
        self, pattern: Pattern, names: Mapping[str, object]
    ) -> Iterator[tuple[str, tuple[str, ...]]]:
        for name in names:
            stars = pattern.match(name)
            if stars is not None:
                yield name, stars

    def _run(self, name: str, stars: tuple[str, ...], steps: Sequence[Transform]) -> None:
        current = [name]
        for step in steps:
            following: list[str] = []
            for each in current:
                try:
                    following += self._step(each, stars, step)
                except CheckpointError as error:
                    self.findings.append(error.as_finding().model_copy(update={"key": each}))
                    self.spoilt.add(each)
                    self.spoilt.update(self._partners(stars, step))
                    self.tensors.pop(each, None)
            current = following

    def _partners(self, stars: tuple[str, ...], step: Transform) -> list[str]:
        return [pattern.expand(stars) for pattern in _names(step)]

    def _step(self, name: str, stars: tuple[str, ...], step: Transform) -> list[str]:
        """Do one thing to one tensor; the names that are then to be gone on with."""
        if isinstance(step, Join):
            return self._join(name, self._partners(stars, step), step)
        tensor = self.tensors[name]
        if isinstance(step, Split):
            return self._split(name, self._partners(stars, step), step)
        if isinstance(step, Cast):
            self.tensors[name] = tensor.cast(step.dtype)
        elif isinstance(step, Transpose):
            self.tensors[name] = tensor.transposed(step.first, step.second)
        else:
            self.tensors[name] = tensor.padded(step.dim, step.size, step.value)
        return [name]

    def _join(self, name: str, partners: list[str], step: Join) -> list[str]:
        sources = {**self.consumed, **self.tensors}
        absent = [partner for partner in partners if partner not in sources]
        if absent:
            self.unmade[name] = (
                f"{name} is joined from {' and '.join(partners)}; absent is {' and '.join(absent)}"
            )
            self.spoilt.update(set(partners).difference(absent))
            return [name] if name in self.tensors else []
        if name in self.tensors and name not in partners:
            raise CheckpointError(
                f"{name} would be joined from {' and '.join(partners)}, but the checkpoint has it too",
                code="keys.renamed",
                key=name,
                sources=[name, *partners],
            )
        try:
            made = Assembly.joined(step.dim, [(partner, sources[partner]) for partner in partners])
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}", code=error.code, key=name) from None
        for partner in set(partners) & self.tensors.keys():
            self.consumed[partner] = sources[partner]
            if partner not in self.wanted:
                del self.tensors[partner]
        self.tensors[name] = made
        return [name]

    def _split(self, name: str, into: list[str], step: Split) -> list[str]:
        tensor = self.tensors[name]
        taken = [piece for piece in into if piece in self.tensors and piece != name]
        if taken or len(set(into)) < len(into):
            raise CheckpointError(
                f"{name} cannot be split into {' and '.join(into)}: "
                + (f"{taken[0]} is in the checkpoint too" if taken else "a name stands twice"),
                code="keys.renamed",
                key=name,
                sources=[name, *taken],
            )
        sizes = step.sizes
        if sizes is None:
            shapes = [self.wanted.get(piece, ()) for piece in into]
            tensor.require_dim(step.dim, "split")
            if any(not -len(shape) <= step.dim < len(shape) for shape in shapes):
                raise CheckpointError(
                    f"{name} is split into {' and '.join(into)}, and not all of them are tensors of the "
                    "state dict that show how large they are: give sizes=",
                    code="keys.shape",
                    key=name,
                )
            sizes = tuple(shape[step.dim] for shape in shapes)
        pieces = tensor.pieces(step.dim, sizes)
        del self.tensors[name]
        self.tensors.update(zip(into, pieces, strict=True))
        return into
