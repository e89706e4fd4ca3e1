"""Values that each rank has its own of, stored once for all.

torch keeps one of several ranks' values under a key, and which one may differ from key to key. A random
number state, a sampler or a dataloader's position that stands once in a checkpoint of several writers was
therefore most likely lost on all ranks but one. Judged by names, so a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from dcp.dtypes import FLOATING
from dcp.findings import Finding, finding
from dcp.index import CheckpointIndex, Entry, ObjectEntry

_LOADER = r"(data_?loader|data_?iter(ator)?|(batch_?)?sampler)"
_COUNTED = r"(samples|tokens|batches|examples|sequences)"
_CONSUMED = r"(seen|consumed|read|processed)"
_PER_RANK = re.compile(
    r"(\w*[_-])?(rng|prng|random|seed|generator)([_-]?states?)?"
    rf"|(\w*[_-])?({_LOADER}|dataset|data)[_-]?(states?|position|offset|cursor)"
    rf"|(\w*[_-])?{_LOADER}"
    rf"|{_COUNTED}[_-]{_CONSUMED}|{_CONSUMED}[_-]{_COUNTED}",
    re.IGNORECASE,
)
"""Components of a key that name something each rank has its own of."""

_RANKED = re.compile(
    r"(.*[_-])?(rank|dp|worker|shard|proc(ess)?|host|node|gpu)[_-]?\d+.*|(.*\D)?[_-]?\d+", re.IGNORECASE
)
"""Components that tell ranks apart: ``rank_17``, ``dp_rank_0``, ``rng_1``, ``3``."""

_WRITER = re.compile(r"(?:.*/)?__(\d+)_\d+\.distcp")


def check_ranks(index: CheckpointIndex) -> Iterator[Finding]:
    """Findings about per-rank values that are stored once; one for each name, with all its keys."""
    writers = {match[1] for path in index.files() if (match := _WRITER.fullmatch(path))}
    if len(writers) < 2:
        return
    shared: dict[str, list[str]] = {}
    ranked: set[str] = set()
    for key, entry in index.entries.items():
        name, per_rank = _named(key)
        if name is None:
            continue
        if per_rank:
            ranked.add(name)
        elif _stored_once(entry):
            shared.setdefault(name, []).append(key)
    for name, keys in shared.items():
        # Beside values kept for each rank, the rest is what they have in common.
        if name in ranked:
            continue
        yield finding(
            "ranks.shared-value",
            f"{name} is stored once, but {len(writers)} ranks wrote this checkpoint: if each has its own, "
            f"all but one are lost. Save it per rank, as {name}.rank_R",
            key=keys[0],
            keys=keys[:100],
            ranks=len(writers),
            suggestion=f"{name}.rank_R",
        )


def _stored_once(entry: Entry) -> bool:
    """A single value that may be state of a process; floating tensors are weights, whatever their name."""
    return isinstance(entry, ObjectEntry) or (len(entry.chunks) == 1 and entry.dtype not in FLOATING)


def _named(key: str) -> tuple[str | None, bool]:
    """The key up to the component that names a per-rank value, and whether one tells ranks apart."""
    parts = re.split(r"[./]", key)
    for number, part in enumerate(parts):
        if _PER_RANK.fullmatch(part):
            name = key[: sum(map(len, parts[: number + 1])) + number]
            others = (*parts[:number], *parts[number + 1 : number + 2])
            return name, any(_RANKED.fullmatch(other) for other in others)
    return None, False
