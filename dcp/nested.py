"""Where the keys of a flattened state stand in the nested one, by the names its dictionaries have.

torch flattens a state to keys such as ``optim.state.0.step`` and on the way takes every name in a dictionary
for text: the path of that key is ``("optim", "state", "0", "step")`` also where the dictionary has the number
0. A value that is put back by such a path becomes a second entry, under ``"0"``. `Places` gives the names
that are there. Pure Python, on dictionaries and lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dcp.errors import UsageError

Path = tuple[Any, ...]
"""Where a value stands in a nested state: names and list positions."""


def place(path: Path) -> str:
    """The path in words, as code would have it: ``state['seen'][0]``."""
    return "state" + "".join(f"[{part!r}]" for part in path)


def keys_around(path: Path) -> tuple[str, ...]:
    """The key of a place and of everything that it stands in, outermost first: ``a``, ``a.b``, ``a.b.c``."""
    return tuple(".".join(map(str, path[:end])) for end in range(1, len(path) + 1))


def require_distinct(paths: Iterable[Path]) -> None:
    """No two places of a nested state have one key once it is flattened.

    Raises:
        UsageError: two have; names both.
    """
    seen: dict[str, Path] = {}
    for path in paths:
        key = ".".join(map(str, path))
        known = seen.setdefault(key, path)
        if known is not path:
            raise _same(known, path, key)


class Places:
    """The places of one nested state, whose dictionaries must keep their names meanwhile."""

    def __init__(self, state: Mapping[Any, Any]) -> None:
        self._state = state
        self._names: dict[int, dict[str, Any]] = {}

    def own(self, path: Path) -> Path:
        """The path with the dictionaries' own names. What is not there keeps the name it was given.

        Raises:
            UsageError: two names of a dictionary on the way are the same as text.
        """
        held: Any = self._state
        found: list[Any] = []
        for part in path:
            name = part
            if isinstance(held, Mapping):
                name = self._names_of(held, found).get(str(part), part)
                held = held.get(name)
            elif isinstance(held, Sequence) and isinstance(part, int) and part < len(held):
                held = held[part]
            else:
                held = None
            found.append(name)
        return tuple(found)

    def put(self, path: Path, value: Any) -> bool:
        """Put a value where `own` found one; whether there was such a place."""
        held: Any = self._state
        for part in path[:-1]:
            if (isinstance(held, Mapping) and part in held) or (isinstance(held, list) and part < len(held)):
                held = held[part]
            else:
                return False
        last = path[-1]
        if (isinstance(held, dict) and last in held) or (isinstance(held, list) and last < len(held)):
            held[last] = value
            return True
        return False

    def _names_of(self, held: Mapping[Any, Any], way: Sequence[Any]) -> dict[str, Any]:
        known = self._names.get(id(held))
        if known is None:
            known = self._names[id(held)] = {}
            for name in held:
                other = known.setdefault(str(name), name)
                if other is not name:
                    raise _same((*way, other), (*way, name), ".".join(map(str, (*way, name))))
        return known


def _same(one: Path, other: Path, key: str) -> UsageError:
    return UsageError(
        f"{place(one)} and {place(other)} of the state would both have the key {key}: rename one"
    )
