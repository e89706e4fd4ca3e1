"""What the tensors hold, from a scrub: norms, and values that no model should have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite, sqrt

from dcp.checks.scrub import TensorHealth
from dcp.findings import Finding
from flows.text import name

_MOST = 20


@dataclass(frozen=True, slots=True)
class TensorNorm:
    """One tensor. ``bad`` counts NaN and infinite elements."""

    key: str
    norm: float | None
    nan: int
    inf: int
    zero: bool


@dataclass(frozen=True, slots=True)
class GroupNorm:
    """Tensors whose keys begin alike, and the norm of all of them together."""

    name: str
    tensors: int
    norm: float


@dataclass(frozen=True, slots=True)
class Health:
    """What a scrub saw. Lists hold the first or largest few; counts are whole."""

    tensors: int
    nonfinite: int
    zeros: int
    unchanged: int
    suspects: tuple[TensorNorm, ...]
    groups: tuple[GroupNorm, ...]
    largest: tuple[TensorNorm, ...]


def health_of(tensors: Mapping[str, TensorHealth], findings: Iterable[Finding]) -> Health:
    """Sum up what tensors hold; ``findings`` say which did not change since another step."""
    known = [_norm(key, each) for key, each in tensors.items()]
    bad = [each for each in known if each.nan or each.inf]
    zeros = [each for each in known if each.zero]
    sized = [each for each in known if each.norm is not None]
    return Health(
        tensors=len(known),
        nonfinite=len(bad),
        zeros=len(zeros),
        unchanged=sum(found.code == "values.unchanged" for found in findings),
        suspects=tuple([*bad, *(each for each in zeros if each not in bad)][:_MOST]),
        groups=group_norms(tensors),
        largest=tuple(sorted(sized, key=lambda each: -(each.norm or 0.0))[:_MOST]),
    )


def group_norms(tensors: Mapping[str, TensorHealth]) -> tuple[GroupNorm, ...]:
    """Norms by what stands before the first dot of a key, largest first."""
    squares: dict[str, tuple[int, float]] = {}
    for key, each in tensors.items():
        if each.norm is None or not isfinite(each.norm):
            continue
        top = key.partition(".")[0]
        count, total = squares.get(top, (0, 0.0))
        squares[top] = (count + 1, total + each.norm**2)
    groups = [GroupNorm(name(top, 60), count, sqrt(total)) for top, (count, total) in squares.items()]
    return tuple(sorted(groups, key=lambda group: -group.norm)[:_MOST])


def norms_by_group(tensors: Mapping[str, TensorHealth]) -> dict[str, float]:
    """`group_norms` as what the ledger keeps of a scrubbed step."""
    return {group.name: float(f"{group.norm:.6g}") for group in group_norms(tensors)}


def _norm(key: str, each: TensorHealth) -> TensorNorm:
    norm = each.norm if each.norm is not None and isfinite(each.norm) else None
    return TensorNorm(name(key), norm, each.nan or 0, each.inf or 0, bool(each.zero))
