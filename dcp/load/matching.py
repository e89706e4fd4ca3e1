"""Holding a checkpoint against a state dict: what goes where, and everything that does not fit.

`match` is pure: it gets what the checkpoint has and what the state dict wants, and gives `Matched` with an
`Assembly` or the saved object's key for each key of the state dict, and findings. Nothing is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dcp.contract import Expected
from dcp.errors import StateMismatchError
from dcp.findings import Finding, finding
from dcp.load.assembly import Assembly
from dcp.load.patterns import Pattern, matches_any
from dcp.load.rename import Renamed
from dcp.load.transforms import Arrangement, Transform
from dcp.rank_keys import rank_key, split_rank_key
from dcp.renames import find_renames

SHOWN = 50
"""Findings of one code that a message spells out."""

_ORDER = ("keys.renamed", "keys.missing", "keys.unexpected", "keys.shape", "keys.dtype", "keys.kind")
_NUMBERS = re.compile(r"(\d+)")

Kept = tuple[Pattern, Sequence[Transform]]


@dataclass(slots=True)
class Matched:
    """What `match` found. Keys are the state dict's unless something else is said."""

    tensors: dict[str, Assembly] = field(default_factory=dict)
    objects: dict[str, str] = field(default_factory=dict)
    """The checkpoint's key of each object."""
    missing: list[str] = field(default_factory=list)
    """Keys that the checkpoint does not have, whether that is allowed or not."""
    unexpected: list[str] = field(default_factory=list)
    """Names, after renaming, that only the checkpoint has."""
    skipped: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    """Patterns of transforms that met no key."""


def match(
    wanted: Mapping[str, Expected],
    saved: Mapping[str, Expected],
    renamed: Renamed,
    transforms: Sequence[Kept],
    *,
    skip: Sequence[Pattern],
    may_be_missing: Callable[[str], bool],
    extra_allowed: bool,
) -> Matched:
    """Hold what is saved against what is wanted.

    Args:
        wanted: the state dict's keys.
        saved: the checkpoint's, by its own keys.
        renamed: names of the checkpoint's keys.
        transforms: see `dcp.load.transforms.parse`.
        skip: names and keys that are left alone.
        may_be_missing: whether it is no fault that the checkpoint lacks a key.
        extra_allowed: whether it is no fault that the checkpoint has more.
    """
    result = Matched(findings=list(renamed.collisions))
    tensors: dict[str, Assembly] = {}
    objects: dict[str, str] = {}
    for name, source in renamed.sources.items():
        held = saved[source]
        if held.kind == "tensor":
            assert held.shape is not None
            assert held.dtype is not None
            tensors[name] = Assembly.of(source, held.shape, held.dtype)
        else:
            objects[name] = source
    shapes = {key: value.shape for key, value in wanted.items() if value.shape is not None}
    made = Arrangement(tensors, shapes)
    made.apply(transforms)
    result.findings += made.findings
    result.idle = made.idle
    for key, expected in wanted.items():
        if matches_any(skip, key):
            result.skipped.append(key)
        elif key in tensors and expected.kind == "tensor":
            found = list(_differences(key, expected, tensors[key]))
            result.findings += found
            if not found:
                result.tensors[key] = tensors[key]
        elif key in objects and expected.kind == "bytes":
            result.objects[key] = objects[key]
        elif key in tensors or key in objects:
            result.findings.append(_kind(key, expected, "tensor" if key in tensors else "bytes"))
        elif key not in made.spoilt or key in made.unmade:
            result.missing.append(key)
            if not may_be_missing(key):
                message = made.unmade.get(key, f"{key} is not in the checkpoint")
                result.findings.append(finding("keys.missing", message, key=key, facts=_facts(expected)))
    for name in [*tensors, *objects]:
        if name in wanted:
            continue
        if matches_any(skip, name):
            result.skipped.append(name)
            continue
        result.unexpected.append(name)
        if not extra_allowed and name not in made.spoilt:
            if name in renamed.sources:
                message = f"{_named(name, renamed)} is in the checkpoint and not in the state dict"
            else:
                made_of = " and ".join(tensors[name].sources)
                message = (
                    f"{name}, which transform makes of {made_of}, is not in the state dict: add it there, or "
                    f"leave it out with skip=[{name!r}]"
                )
            result.findings.append(finding("keys.unexpected", message, key=name))
    result.findings += _hints(wanted, tensors, objects, result)
    return result


def _differences(key: str, expected: Expected, actual: Assembly) -> Iterator[Finding]:
    saved = {"kind": "tensor", "shape": list(actual.shape), "dtype": actual.dtype}
    facts = {"expected": expected.facts(), "actual": saved, "steps": list(actual.steps)}
    whence = f" after {', '.join(actual.steps)}" if actual.steps else ""
    if expected.shape != actual.shape:
        wanted = list(expected.shape or ())
        message = (
            f"{key} has shape {list(actual.shape)}{whence} in the checkpoint, {wanted} in the state dict"
        )
        yield finding("keys.shape", message, key=key, facts=facts)
    if expected.dtype != actual.dtype:
        said = f"{key} is {actual.dtype}{whence} in the checkpoint, {expected.dtype} in the state dict; "
        casts = sum(step.startswith("cast ") for step in actual.steps)
        if casts:
            advice = "cast to that last" + (": the rules that it meets are applied in turn" * (casts > 1))
        else:
            advice = f"nothing is cast unless transform={{{key!r}: cast({expected.dtype!r})}} says so"
        yield finding("keys.dtype", said + advice, key=key, facts=facts)


def _kind(key: str, expected: Expected, actual: str) -> Finding:
    words = {"tensor": "a tensor", "bytes": "an object"}
    message = f"{key} is {words[actual]} in the checkpoint, {words[expected.kind]} in the state dict"
    facts = {"expected": expected.facts(), "actual": {"kind": actual}}
    return finding("keys.kind", message, key=key, facts=facts)


def _hints(
    wanted: Mapping[str, Expected],
    tensors: Mapping[str, Assembly],
    objects: Mapping[str, str],
    found: Matched,
) -> Iterator[Finding]:
    """Keys that seem to be only named differently; said beside their absence."""
    absent = {f.key for f in found.findings if f.code == "keys.missing"}
    missing = {key: _content(wanted[key]) for key in found.missing if key in absent}
    unexpected = {
        name: ("tensor", tensors[name].shape, tensors[name].dtype)
        if name in tensors
        else ("bytes", None, None)
        for name in found.unexpected
        # One rank's own is told of by `of_rank_keys`.
        if (name in tensors or name in objects) and split_rank_key(name) is None
    }
    if not missing or not unexpected:
        return
    for renames in find_renames(unexpected, missing):
        old, new = renames.pairs[0]
        yield finding(
            "keys.renamed",
            f"{len(renames.pairs)} keys seem to be only named differently, so rename= may help: "
            f"{renames.rule}, e.g. {old} in the checkpoint is {new} in the state dict",
            key=new,
            severity="info",
            rule=renames.rule,
            renames=dict(renames.pairs),
        )


def _content(value: Expected) -> tuple[str, tuple[int, ...] | None, str | None]:
    return value.kind, value.shape, value.dtype


def _facts(expected: Expected) -> dict[str, object]:
    return {"expected": expected.facts()}


def _named(name: str, renamed: Renamed) -> str:
    source = renamed.sources.get(name, name)
    return name if source == name else f"{name} (saved as {source})"


def mismatch_error(findings: Sequence[Finding]) -> StateMismatchError:
    """One error that tells of all findings, those of one code together."""
    findings = sorted(findings, key=_position)
    by_code: dict[str, list[Finding]] = {}
    for found in findings:
        by_code.setdefault(found.code, []).append(found)
    errors = sum(found.severity == "error" for found in findings)
    count = "1 problem" if errors == 1 else f"{errors} problems"
    lines = [f"the checkpoint does not fit the state dict; nothing was loaded. {count}:"]
    for code, group in by_code.items():
        lines += [f"  {code}: {found.message}" for found in group[:SHOWN]]
        if len(group) > SHOWN:
            lines.append(f"  {code}: and {len(group) - SHOWN} more, all in the error's findings")
    return StateMismatchError("\n".join(lines), findings)


def _position(found: Finding) -> tuple[object, ...]:
    """Hints last; kinds in the order in which they matter, keys as a reader would sort them."""
    order = _ORDER.index(found.code) if found.code in _ORDER else len(_ORDER)
    parts = [(int(part), "") if part.isdigit() else (-1, part) for part in _NUMBERS.split(found.key or "")]
    return found.severity == "info", order, parts, found.message


def merged(by_rank: Sequence[tuple[int, Sequence[Finding]]]) -> list[Finding]:
    """The findings of all ranks, each once; those that not all ranks have say which do.

    What only some ranks do not expect is another one's, such as its own RNG state or its pipeline stage.
    """
    ranks = len(by_rank)
    first: dict[tuple[str, str | None, str], Finding] = {}
    having: dict[tuple[str, str | None, str], list[int]] = {}
    for rank, findings in by_rank:
        for found in findings:
            mark = (found.code, found.key, found.message)
            first.setdefault(mark, found)
            having.setdefault(mark, []).append(rank)
    return [
        found
        if len(having[mark]) == ranks
        else found.model_copy(
            update={
                "message": f"rank {', '.join(map(str, having[mark]))}: {found.message}",
                "detail": {**found.detail, "ranks": having[mark]},
            }
        )
        for mark, found in first.items()
        if found.code != "keys.unexpected" or len(having[mark]) == ranks
    ]


def of_rank_keys(findings: Sequence[Finding], writers: Mapping[str, tuple[int, ...]]) -> Iterator[Finding]:
    """What to say where a key is missing under which every rank saved a value of its own.

    Args:
        findings: what does not fit.
        writers: ranks that saved, by the key whose values they are.
    """
    missing = {found.key for found in findings if found.code == "keys.missing" and found.key in writers}
    for key in sorted(filter(None, missing)):
        yield finding(
            "keys.missing",
            f"{key} was saved by {_those(writers[key])}, each its own, as {rank_key(key, writers[key][0])} "
            f"and so on: load it with per_rank=[{key!r}]",
            key=key,
            severity="info",
            saved_by=list(writers[key]),
        )


def of_other_ranks(
    findings: Sequence[Finding], writers: Mapping[str, tuple[int, ...]], ranks: Sequence[int]
) -> Iterator[Finding]:
    """What to say where values that every rank saved for itself are loaded by other ranks.

    Args:
        findings: what does not fit.
        writers: ranks that saved, by the key whose values they are.
        ranks: ranks that load.
    """
    told = {found.key for found in findings if found.code == "keys.missing" and found.key in writers}
    loading = tuple(sorted(ranks))
    for found in findings:
        own = split_rank_key(found.key or "")
        if own is None or own[0] in told or writers.get(own[0], loading) == loading:
            continue
        key, saved = own[0], writers[own[0]]
        told.add(key)
        yield finding(
            found.code,
            f"{key} was saved by {_those(saved)}, each its own, as {rank_key(key, saved[0])} to "
            f"{rank_key(key, saved[-1])}, and {_those(loading)} load: load on the same, or leave them as "
            f"they are with skip=[{key + '/rank_*'!r}] and begin them anew",
            key=key,
            severity="info",
            saved_by=list(saved),
            loaded_by=list(loading),
        )


def _those(ranks: Sequence[int]) -> str:
    """``4 ranks`` for the first four of a job, else their numbers."""
    if list(ranks) == list(range(len(ranks))):
        return f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}" + (", …" if len(ranks) > 8 else "")
