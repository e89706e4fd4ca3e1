"""Keys of the ranks' own: what differs between ranks is saved as ``rng/rank_0``, ``rng/rank_1``, ….

The save planner makes them, the load planners find each rank's own again. Pure functions on names, which
need no torch.
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


def writers(keys: Iterable[str]) -> dict[str, int]:
    """Number of ranks that saved values of their own under each key: one more than the highest of them."""
    ranks: dict[str, int] = defaultdict(int)
    for key in keys:
        own = split_rank_key(key)
        if own is not None:
            ranks[own[0]] = max(ranks[own[0]], own[1] + 1)
    return dict(ranks)
