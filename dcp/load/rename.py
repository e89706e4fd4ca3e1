"""Other names for a checkpoint's keys, as rules on path components. Pure functions on names.

A rule replaces a run of whole components wherever it stands: ``"net" -> "model"`` turns ``net.w`` into
``model.w`` and leaves ``subnet.w`` alone; ``"_orig_mod" -> ""`` takes the component away. Both sides may
have several components (``"model.layers" -> "decoder.blocks"``). Rules are applied one after the other. Where
every rank saved a value of its own (``rng/rank_3``), a rule for ``rng`` renames it for each of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dcp.errors import UsageError
from dcp.findings import Finding, finding
from dcp.rank_keys import rank_key, split_rank_key

_GROUP = re.compile(r"\\(\d|g<)")

Rules = Mapping[str, str] | Sequence[tuple[str, str]]
"""Old to new names, each one or more components joined by dots."""


@dataclass(frozen=True, slots=True)
class Renamed:
    """Keys under the names that rules gave them."""

    sources: Mapping[str, str]
    """The checkpoint's key by the name it goes by now."""
    collisions: tuple[Finding, ...]
    """Names that several keys would have."""
    idle: tuple[str, ...]
    """Rules that met no key, in words."""


def pairs_of(rules: Rules | None) -> tuple[tuple[str, str], ...]:
    """The rules as pairs.

    Raises:
        UsageError: a rule replaces nothing, is no pair of names, or has groups as in regular expressions.
    """
    given: object = rules
    if isinstance(given, str):
        old, _, new = given.partition("=")
        raise UsageError(f"rename is one text; give old and new names, e.g. {{{old!r}: {new!r}}}")
    pairs = tuple(rules.items() if isinstance(rules, Mapping) else rules or ())
    for pair in pairs:
        if not _is_pair(pair):
            raise UsageError(f"rename rule {pair!r} is no pair of names, such as ('net', 'model')")
        old, new = pair
        if not old:
            raise UsageError("a rename rule needs the old component's name, e.g. {'module': ''}")
        if "" in old.split(".") or (new and "" in new.split(".")):
            raise UsageError(
                f"rename rule {old!r} -> {new!r}: names are whole components, without a dot at either end, "
                f"e.g. {old.strip('.')!r} -> {new.strip('.')!r}"
            )
        if _GROUP.search(new):
            raise UsageError(
                f"rename rule {old!r} -> {new!r}: the replacement is taken as it stands and knows no groups; "
                "rules are plain names of path components, not regular expressions"
            )
    return pairs


def _is_pair(rule: object) -> bool:
    """Whether a rule, which a caller may have made without a type checker, is two names."""
    return isinstance(rule, tuple | list) and len(rule) == 2 and all(isinstance(name, str) for name in rule)


def rename(keys: Iterable[str], rules: Sequence[tuple[str, str]]) -> Renamed:
    """Apply rules to a checkpoint's keys."""
    parsed = [(tuple(old.split(".")), tuple(new.split(".")) if new else ()) for old, new in rules]
    used: set[int] = set()
    sources: dict[str, str] = {}
    collisions: list[Finding] = []
    for key in keys:
        parts = tuple(key.split("."))
        for number, (old, new) in enumerate(parsed):
            if not _stands_in(parts, old):
                base, number_of_rank = _without_rank(parts)
                if not _stands_in(base, old):
                    continue
                replaced = _replaced(base, old, new)
                parts = (*replaced[:-1], rank_key(replaced[-1], number_of_rank)) if replaced else ()
            else:
                parts = _replaced(parts, old, new)
            used.add(number)
        name = ".".join(parts)
        other = sources.setdefault(name, key)
        if other != key:
            collisions.append(
                finding(
                    "keys.renamed",
                    f"{other} and {key} would both be named {name or 'nothing'}: change the rename rules",
                    key=name,
                    sources=[other, key],
                )
            )
    idle = tuple(f"{old!r} -> {new!r}" for n, (old, new) in enumerate(rules) if n not in used)
    return Renamed(sources, tuple(collisions), idle)


def _without_rank(parts: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
    """The components of what every rank has of its own, and whose it is; none if it is no such key."""
    own = split_rank_key(parts[-1]) if parts else None
    return ((), 0) if own is None else ((*parts[:-1], own[0]), own[1])


def _stands_in(parts: tuple[str, ...], run: tuple[str, ...]) -> bool:
    return any(parts[i : i + len(run)] == run for i in range(len(parts) - len(run) + 1))


def _replaced(parts: tuple[str, ...], old: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, ...]:
    result: list[str] = []
    place = 0
    while place < len(parts):
        if parts[place : place + len(old)] == old:
            result += new
            place += len(old)
        else:
            result.append(parts[place])
            place += 1
    return tuple(result)
