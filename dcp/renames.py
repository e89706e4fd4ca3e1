"""Keys that are the same under another name: which rules turn the old names into the new ones.

Given what is missing and what is unexpected, `find_renames` pairs keys that hold the same (kind, shape,
dtype) and whose names differ by something recognisable, and gathers pairs under the rule that explains
them. In order of trust: wrapper components inserted or removed, one part of the name replaced by another,
the two spellings of optimizer state, and at last merely similar names. Pure functions on names.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Components that wrappers insert into the names of a model's parameters."""

MAX_RULES = 64
"""Replacements tried on one comparison: each costs a pass over the keys."""
MAX_SIMILAR = 200
"""Keys of one shape and type among which similar names are looked for: each pair is compared."""
_SIMILAR = 0.7

_STATE = re.compile(
    r"(.*\bstate)\.(?:(step|exp_avg_sq|exp_avg|momentum_buffer|max_exp_avg_sq)\.(.+)|(.+)\.(\w+))"
)


@dataclass(frozen=True, slots=True)
class Renames:
    """Keys renamed by one rule: pairs of (old, new)."""

    rule: str
    """The rule in words."""
    pairs: tuple[tuple[str, str], ...]


def find_renames(missing: Mapping[str, Hashable], unexpected: Mapping[str, Hashable]) -> list[Renames]:
    """Pair missing with unexpected keys.

    Args:
        missing: keys that are gone, with what they hold; only keys that hold the same are paired.
        unexpected: keys that are new, likewise.
    """
    lost, added = dict(missing), dict(unexpected)
    found: list[Renames] = []

    def take(rule: str, pairs: list[tuple[str, str]]) -> None:
        for old, new in pairs:
            del lost[old], added[new]
        if pairs:
            found.append(Renames(rule, tuple(pairs)))

    by_rule: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for old, new in _same_form(lost, added, _unwrapped):
        by_rule[_wrapper_rule(old, new)].append((old, new))
    for rule, pairs in by_rule.items():
        take(rule, pairs)
    for part, by in _replacements(lost, added):
        take(f"{part!r} became {by!r}" if part else f"{by!r} was inserted", _replaced(lost, added, part, by))
    take("optimizer state is spelled the other way round", list(_same_form(lost, added, _state_form)))
    for old, new in _similar(lost, added):
        take(f"{old!r} became {new!r}", [(old, new)])
    return found


# --- the same form: names that are equal once something is left out


def _same_form(
    lost: Mapping[str, Hashable], added: Mapping[str, Hashable], form: Callable[[str], str]
) -> Iterator[tuple[str, str]]:
    """Pairs whose form is equal, where it is so for one key on each side only."""
    forms: dict[str, list[str]] = defaultdict(list)
    for key in added:
        forms[form(key)].append(key)
    taken: Counter[str] = Counter(form(key) for key in lost)
    for key, holds in lost.items():
        same = forms.get(form(key), [])
        if len(same) == 1 and taken[form(key)] == 1 and added[same[0]] == holds:
            yield key, same[0]


def _unwrapped(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in WRAPPERS)


def _wrapper_rule(old: str, new: str) -> str:
    before, after = (Counter(p for p in key.split(".") if p in WRAPPERS) for key in (old, new))
    inserted = [f"{name + '.'!r}" for name in sorted((after - before).keys())]
    removed = [f"{name + '.'!r}" for name in sorted((before - after).keys())]
    words = [f"{' and '.join(inserted)} was inserted"] if inserted else []
    words += [f"{' and '.join(removed)} was removed"] if removed else []
    return ", ".join(words) or "wrappers moved"


def _state_form(key: str) -> str:
    """Optimizer state as (optimizer, parameter, quantity), whichever comes first in the name."""
    match = _STATE.fullmatch(key)
    if match is None:
        return key
    optimizer, quantity, parameter, other, last = match.groups()
    return f"{optimizer}\0{parameter or other}\0{quantity or last}"


# --- one part replaced by another


def _replacements(lost: Mapping[str, Hashable], added: Mapping[str, Hashable]) -> list[tuple[str, str]]:
    """Candidate replacements, the one that most pairs show first.

    Keys that hold the same are paired in order; the differing middle of the two names is a candidate.
    """
    votes: Counter[tuple[str, str]] = Counter()
    by_content: dict[Hashable, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for key, holds in lost.items():
        by_content[holds][0].append(key)
    for key, holds in added.items():
        by_content[holds][1].append(key)
    for old_keys, new_keys in by_content.values():
        for old, new in zip(old_keys, new_keys, strict=False):
            votes[_difference(old, new)] += 1
    return [pair for pair, count in votes.most_common(MAX_RULES) if count > 1 or _is_edge(*pair)]


def _is_edge(part: str, by: str) -> bool:
    """Whether a replacement seen once is plain enough to believe: something added or taken away."""
    return not part or not by


def _difference(old: str, new: str) -> tuple[str, str]:
    """The differing middle of two dotted names: ``("", "net.")`` for ``a.w`` and ``a.net.w``."""
    if new.startswith(f"{old}."):
        return "", new.removeprefix(old)
    if old.startswith(f"{new}."):
        return old.removeprefix(new), ""
    left, right = [p + "." for p in old.split(".")], [p + "." for p in new.split(".")]
    left[-1], right[-1] = left[-1][:-1], right[-1][:-1]
    shorter = min(len(left), len(right))
    head = 0
    while head < shorter and left[head] == right[head]:
        head += 1
    tail = 0
    while tail < shorter - head and left[-1 - tail] == right[-1 - tail]:
        tail += 1
    return "".join(left[head : len(left) - tail]), "".join(right[head : len(right) - tail])


def _replaced(
    lost: Mapping[str, Hashable], added: Mapping[str, Hashable], part: str, by: str
) -> list[tuple[str, str]]:
    """Pairs that replacing ``part`` by ``by`` once, at a component boundary, explains; each key once."""
    taken: set[str] = set()
    pairs: list[tuple[str, str]] = []
    for key, holds in lost.items():
        for start in _places(key, part):
            renamed = key[:start] + by + key[start + len(part) :]
            if renamed not in taken and added.get(renamed, _NOTHING) == holds:
                taken.add(renamed)
                pairs.append((key, renamed))
                break
    return pairs


_NOTHING = object()


def _places(key: str, part: str) -> Iterator[int]:
    """Component boundaries of ``key`` at which ``part`` stands, its end included."""
    start = 0
    while True:
        if key.startswith(part, start):
            yield start
        dot = key.find(".", start)
        if dot < 0:
            break
        start = dot + 1
    if key.endswith(part):
        yield len(key) - len(part)


# --- merely similar names


def _similar(lost: Mapping[str, Hashable], added: Mapping[str, Hashable]) -> Iterator[tuple[str, str]]:
    """The most similar names first, as far as they are similar at all."""
    by_content: dict[Hashable, list[str]] = defaultdict(list)
    for key, holds in added.items():
        by_content[holds].append(key)
    scored: list[tuple[float, str, str]] = []
    for old, holds in lost.items():
        candidates = by_content.get(holds, [])
        if len(candidates) > MAX_SIMILAR:
            continue
        for new in candidates:
            ratio = SequenceMatcher(None, old, new, autojunk=False).ratio()
            if ratio >= _SIMILAR:
                scored.append((ratio, old, new))
    used: set[str] = set()
    for _, old, new in sorted(scored, reverse=True):
        if old not in used and new not in used:
            used |= {old, new}
            yield old, new
