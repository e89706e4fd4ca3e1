"""Contracts: the keys, shapes and dtypes that loading code expects, and how a checkpoint departs from them.

A `Contract` is JSON with a version. It comes from a checkpoint known to be good (`contract_of`) and is
held against another (`compare`). Keys missing on one side and unexpected on the other are matched as
renames first, so that a wrapped model reads as one rule and not as thousands of losses.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from dcp.errors import UsageError
from dcp.findings import Finding, finding
from dcp.index import CheckpointIndex, Entry, TensorEntry
from dcp.storage import open_parent

VERSION = 1
LIMIT = 1 << 30
"""Largest contract file read, in bytes."""

MAX_RULES = 64
"""Rename rules tried on one comparison: each costs a pass over the keys."""

WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Path components that wrappers insert into the names of a model's parameters."""


class Expected(BaseModel):
    """What one key should hold. Shape in elements; shape and dtype only for tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["tensor", "bytes"]
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


class Contract(BaseModel):
    """Expected keys. ``source`` says where they were taken from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    source: str | None = None
    keys: dict[str, Expected]


def contract_of(index: CheckpointIndex, source: str | None = None) -> Contract:
    """The contract that ``index`` fulfils."""
    return Contract(source=source, keys={key: _expected(entry) for key, entry in index.entries.items()})


def _expected(entry: Entry) -> Expected:
    if isinstance(entry, TensorEntry):
        return Expected(kind="tensor", shape=entry.shape, dtype=entry.dtype)
    return Expected(kind="bytes")


def read_contract(location: str) -> Contract:
    """Read a contract file from a path or URL.

    Raises:
        UsageError: it is not a contract; the message names the first wrong field.
        StorageError: it cannot be read.
    """
    store, name = open_parent(location)
    try:
        return Contract.model_validate_json(store.read(name, LIMIT))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "document"
        raise UsageError(
            f"{location} is not a contract: {field}: {first['msg']}; write one with: ckpt contract URL"
        ) from None


def compare(contract: Contract, index: CheckpointIndex) -> list[Finding]:
    """Every departure of ``index`` from ``contract``."""
    actual = {key: _expected(entry) for key, entry in index.entries.items()}
    missing = {key: value for key, value in contract.keys.items() if key not in actual}
    unexpected = {key: value for key, value in actual.items() if key not in contract.keys}
    findings = list(_renamed(missing, unexpected))
    findings += [
        finding("keys.missing", f"{key} is expected and absent", key=key, expected=_facts(value))
        for key, value in missing.items()
    ]
    findings += [
        finding("keys.unexpected", f"{key} is present and not expected", key=key, actual=_facts(value))
        for key, value in unexpected.items()
    ]
    for key, expected in contract.keys.items():
        if key in actual and actual[key] != expected:
            findings.append(_mismatch(key, expected, actual[key]))
    return findings


def _facts(value: Expected) -> dict[str, object]:
    return value.model_dump(mode="json", exclude_none=True)


def _mismatch(key: str, expected: Expected, actual: Expected) -> Finding:
    if expected.kind != actual.kind:
        words = {"tensor": "a tensor", "bytes": "an object"}
        return finding(
            "keys.kind",
            f"{key} is {words[actual.kind]}, expected {words[expected.kind]}",
            key=key,
            expected=_facts(expected),
            actual=_facts(actual),
        )
    if expected.shape != actual.shape:
        return finding(
            "keys.shape",
            f"{key} has shape {list(actual.shape or ())}, expected {list(expected.shape or ())}",
            key=key,
            expected=_facts(expected),
            actual=_facts(actual),
        )
    return finding(
        "keys.dtype",
        f"{key} is {actual.dtype}, expected {expected.dtype}",
        key=key,
        expected=_facts(expected),
        actual=_facts(actual),
    )


def _renamed(missing: dict[str, Expected], unexpected: dict[str, Expected]) -> Iterator[Finding]:
    """Match losses with additions by one substitution each; matched keys leave both maps."""
    for rule in _rules(missing, unexpected):
        pairs = [
            (old, new) for old, new in rule.apply(missing, unexpected) if missing[old] == unexpected[new]
        ]
        if not pairs:
            continue
        for old, new in pairs:
            del missing[old], unexpected[new]
        old, new = pairs[0]
        yield finding(
            "keys.renamed",
            f"{len(pairs)} keys are named differently: {rule}, e.g. {old} is now {new}",
            key=new,
            rule=str(rule),
            count=len(pairs),
            renames=dict(pairs),
        )


class _Rule:
    """``old`` became ``new`` in a key, at one place."""

    def __init__(self, old: str, new: str) -> None:
        self.old = old
        self.new = new

    def __str__(self) -> str:
        return f"{self.old!r} became {self.new!r}" if self.old else f"{self.new!r} was inserted"

    def apply(
        self, missing: Mapping[str, Expected], unexpected: Mapping[str, Expected]
    ) -> Iterator[tuple[str, str]]:
        """Pairs (missing key, unexpected key) the rule explains, each key once."""
        taken: set[str] = set()
        for key in missing:
            for start in _places(key, self.old):
                renamed = key[:start] + self.new + key[start + len(self.old) :]
                if renamed in unexpected and renamed not in taken:
                    taken.add(renamed)
                    yield key, renamed
                    break


def _places(key: str, part: str) -> Iterator[int]:
    """Component boundaries of ``key`` at which ``part`` stands; all of them for the empty part."""
    start = 0
    while True:
        if key.startswith(part, start):
            yield start
        dot = key.find(".", start)
        if dot < 0:
            return
        start = dot + 1


def _rules(missing: Mapping[str, Expected], unexpected: Mapping[str, Expected]) -> list[_Rule]:
    """Candidate rules, the one that explains most first.

    Keys of one shape, dtype and kind are paired in order; what differs between the two names, cut at
    component boundaries, is a candidate. Known wrappers are candidates whether or not a pair shows them.
    """
    votes: Counter[tuple[str, str]] = Counter()
    for wrapper in WRAPPERS:
        votes["", wrapper] = votes[wrapper, ""] = 0
    by_kind: dict[Expected, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for key, value in missing.items():
        by_kind[value][0].append(key)
    for key, value in unexpected.items():
        by_kind[value][1].append(key)
    for lost, added in by_kind.values():
        for old, new in zip(lost, added, strict=False):
            votes[_difference(old, new)] += 1
    wrappers = [pair for pair, count in votes.items() if not count]
    likely = [pair for pair, count in votes.most_common(MAX_RULES) if count]
    return [_Rule(old, new) for old, new in likely + wrappers]


def _difference(old: str, new: str) -> tuple[str, str]:
    """The differing middle of two dotted names: ``("", "module.")`` for ``a.w`` and ``a.module.w``."""
    left, right = [p + "." for p in old.split(".")], [p + "." for p in new.split(".")]
    left[-1], right[-1] = left[-1][:-1], right[-1][:-1]
    head = 0
    while head < min(len(left), len(right)) and left[head] == right[head]:
        head += 1
    tail = 0
    while tail < min(len(left), len(right)) - head and left[-1 - tail] == right[-1 - tail]:
        tail += 1
    return "".join(left[head : len(left) - tail]), "".join(right[head : len(right) - tail])
