"""Does a checkpoint hold the keys, shapes and types that loading code expects, and if not, what happened?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

from dcp.contract import Contract, Expected, contract_of
from dcp.findings import Finding, finding
from dcp.index import CheckpointIndex
from dcp.renames import find_renames

IGNORED = ("*_extra_state*", "*dp_rank_*")
"""Keys that come and go without harm: layers' private state, one rank's own values."""


def check_keys(
    contract: Contract, index: CheckpointIndex, *, ignore: Sequence[str] = IGNORED
) -> Iterator[Finding]:
    """Every departure of ``index`` from ``contract``.

    Args:
        contract: what is expected.
        index: what is there.
        ignore: globs on keys; departures of such keys are reported as ignored.
    """
    expected = dict(contract.keys)
    actual = contract_of(index).keys
    missing = {key: value for key, value in expected.items() if key not in actual}
    unexpected = {key: value for key, value in actual.items() if key not in expected}
    differing = {key: value for key, value in expected.items() if key in actual and actual[key] != value}
    yield from _ignored(ignore, missing, unexpected, differing)
    for renames in find_renames(missing, unexpected):
        for old, new in renames.pairs:
            del missing[old], unexpected[new]
        old, new = renames.pairs[0]
        yield finding(
            "keys.renamed",
            f"{len(renames.pairs)} keys are named differently: {renames.rule}, e.g. {old} is now {new}",
            key=new,
            rule=renames.rule,
            count=len(renames.pairs),
            renames=dict(renames.pairs),
        )
    shrunk, grown = _drift(expected, actual, missing), _drift(actual, expected, unexpected)
    for key, value in missing.items():
        message = f"{key} is expected and absent"
        yield _departure("keys.missing", message, key, shrunk.get(key), {"expected": value.facts()})
    for key, value in unexpected.items():
        message = f"{key} is present and not expected"
        yield _departure("keys.unexpected", message, key, grown.get(key), {"actual": value.facts()})
    for key, value in differing.items():
        yield _mismatch(key, value, actual[key])


def _ignored(ignore: Sequence[str], *departures: dict[str, Expected]) -> Iterator[Finding]:
    """Take ignored keys out of the departures; one finding for each pattern that met any."""
    for pattern in ignore:
        met = sorted({key for found in departures for key in found if fnmatchcase(key, pattern)})
        for key in met:
            for found in departures:
                found.pop(key, None)
        if met:
            yield finding(
                "keys.ignored",
                f"{len(met)} keys that match {pattern!r} differ and are ignored, e.g. {met[0]}",
                key=met[0],
                pattern=pattern,
                keys=met,
            )


def _drift(
    has: Mapping[str, Expected], lacks: Mapping[str, Expected], departed: Mapping[str, Expected]
) -> dict[str, tuple[str, int, int]]:
    """Departed keys of whole items of a list, or of a dict of items alike, that has another length.

    Returns for such a key (the list or dict, its length where the key is, its length where it is not).
    """
    here, there = _children(has), _children(lacks)
    result: dict[str, tuple[str, int, int]] = {}
    for key in departed:
        parts = key.split(".")
        for depth in range(1, len(parts)):
            parent, child = ".".join(parts[:depth]), parts[depth]
            kept = there.get(parent)
            if kept is None:
                break
            if child not in kept:
                alike = child.isdigit() or any(kept[other] == here[parent][child] for other in kept)
                if alike and len(here[parent]) != len(kept) and (child.isdigit() or depth + 1 < len(parts)):
                    result[key] = (parent, len(here[parent]), len(kept))
                break
    return result


def _children(keys: Mapping[str, Expected]) -> dict[str, dict[str, frozenset[str]]]:
    """Direct children of every dotted prefix, each with the names of its own children."""
    children: dict[str, dict[str, set[str]]] = {}
    for key in keys:
        parts = key.split(".")
        for depth in range(1, len(parts)):
            below = children.setdefault(".".join(parts[:depth]), {}).setdefault(parts[depth], set())
            below.update(parts[depth + 1 : depth + 2])
    return {
        prefix: {name: frozenset(below) for name, below in named.items()}
        for prefix, named in children.items()
    }


def _departure(
    code: Literal["keys.missing", "keys.unexpected"],
    message: str,
    key: str,
    drift: tuple[str, int, int] | None,
    facts: dict[str, object],
) -> Finding:
    if drift is None:
        return finding(code, message, key=key, facts=facts)
    parent, with_it, without = drift
    expected, actual = (with_it, without) if code == "keys.missing" else (without, with_it)
    return finding(
        code,
        f"{message}: {parent} has {actual} items, {expected} were expected",
        key=key,
        facts=facts,
        drift={"parent": parent, "expected": expected, "actual": actual},
    )


def _mismatch(key: str, expected: Expected, actual: Expected) -> Finding:
    facts = {"expected": expected.facts(), "actual": actual.facts()}
    if expected.kind != actual.kind:
        words = {"tensor": "a tensor", "bytes": "an object"}
        message = f"{key} is {words[actual.kind]}, expected {words[expected.kind]}"
        return finding("keys.kind", message, key=key, facts=facts)
    if expected.shape != actual.shape:
        message = f"{key} has shape {list(actual.shape or ())}, expected {list(expected.shape or ())}"
        return finding("keys.shape", message, key=key, facts=facts)
    return finding("keys.dtype", f"{key} is {actual.dtype}, expected {expected.dtype}", key=key, facts=facts)
