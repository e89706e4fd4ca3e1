"""Keys of the ranks' own: what differs between ranks is saved as ``rng/rank_0``, ``rng/rank_1``, ….

The save planner makes them, the load planners find each rank's own again. Ranks count within the whole job,
on both sides: a planner is not told of which process group it saves or loads for. Pure functions on names,
which need no torch.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

_OWN = re.compile(r"(?P<key>.+)/rank_(?P<rank>\d{1,9})", re.DOTALL)


def rank_key(key: str, rank: int) -> str:
    """The key of one rank's own value."""
    return f"{key}/rank_{rank}"


def split_rank_key(key: str) -> tuple[str, int] | None:
    """What `rank_key` was given; None if it is no such key."""
    found = _OWN.fullmatch(key)
    return None if found is None else (found["key"], int(found["rank"]))


def writers(keys: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """The ranks that saved values of their own under each key, in order."""
    ranks: dict[str, set[int]] = defaultdict(set)
    for key in keys:
        own = split_rank_key(key)
        if own is not None:
            ranks[own[0]].add(own[1])
    return {key: tuple(sorted(found)) for key, found in ranks.items()}
