"""Values back at their places in the nested state, and what flattening lost on the way.

torch flattens a state dict before it saves it: every key of a dict becomes text, and an empty dict leaves no
trace. What can be known of both from the rest of the checkpoint is restored or told; nothing is guessed.

Integer keys are restored in two maps that torch itself makes:

- ``state`` of an optimizer, for those keys that the ``params`` of a group beside it lists as integers. Where
  the groups list names, the keys stay text, whatever they look like.
- ``milestones`` of a `MultiStepLR`, where all keys are numbers and all values are integers.

Two kinds of dropped containers leave a gap that shows: an item missing inside a list, and an optimizer
with groups but without state. They are told as ``export.dropped-empty``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from dcp.exporting.selection import Selected, dotted, repath
from dcp.findings import Finding, finding
from dcp.index import CheckpointIndex, ObjectEntry, PathPart
from dcp.pickles.nodes import Value

Place = tuple[PathPart, ...]
"""Where a container stands in the nested state."""

IntegerKeys = Mapping[Place, frozenset[str]]
"""Maps, each with those of its keys that were integers."""

_SHOWN = 20
_SCHEDULER = ("gamma", "last_epoch")
"""What stands beside the ``milestones`` of a scheduler."""


class MapKey(int):
    """A part of a path that is an integer key of a dict; a plain int is a position in a list."""


def nest(values: Iterable[tuple[Selected, Value]]) -> dict[Value, Value]:
    """Put values at their paths. Integers address lists (holes are None) unless names stand beside them."""
    root: dict[Value, Value] = {}
    containers: dict[Place, dict[Value, Value]] = {(): root}
    for item, value in values:
        above = root
        for depth in range(1, len(item.path)):
            place = item.path[:depth]
            if place not in containers:
                containers[place] = above[place[-1]] = {}
            above = containers[place]
        above[item.path[-1]] = value
    for place in sorted(containers, key=len, reverse=True):  # inner ones first
        inner = containers[place]
        if place and all(type(part) is int for part in inner):
            length = max(part for part in inner if isinstance(part, int)) + 1
            containers[place[:-1]][place[-1]] = [inner.get(i) for i in range(length)]
        elif any(type(part) is MapKey for part in inner):
            plain = {_key(part): value for part, value in inner.items()}
            inner.clear()
            inner.update(plain)
    return root


def _key(part: Value) -> Value:
    return int(part) if isinstance(part, MapKey) else part


def has_numbered_keys(index: CheckpointIndex, chosen: Sequence[Selected]) -> bool:
    """Whether there are keys that `integer_keys` may find to be integers."""
    return any(_numbered(index, chosen, name) for name in ("state", "milestones"))


def integer_keys(
    index: CheckpointIndex, chosen: Sequence[Selected], value_of: Callable[[ObjectEntry], Value]
) -> IntegerKeys:
    """Which keys were integers.

    Args:
        index: of the checkpoint.
        chosen: what goes out.
        value_of: gives an object's value, None where it cannot be had; asked for no more than is needed.
    """
    groups = _groups(index)
    found: dict[Place, frozenset[str]] = {}
    for place, numbers in _numbered(index, chosen, "state").items():
        values = (value_of(entry) for entry in groups.get(place[:-1], ()))
        listed = {str(number) for value in values for number in _integers(value)}
        found[place] = frozenset(numbers & listed)
    for place, numbers in _numbered(index, chosen, "milestones").items():
        inside: dict[PathPart, ObjectEntry | None] = {
            path[-1]: item.entry if isinstance(item.entry, ObjectEntry) else None
            for item in chosen
            if len(path := index.path_of(item.entry.key)) == len(place) + 1 and path[:-1] == place
        }
        beside = all(dotted((*place[:-1], name)) in index.entries for name in _SCHEDULER)
        counts = [entry is not None and type(value_of(entry)) is int for entry in inside.values()]
        if beside and numbers == inside.keys() and all(counts):
            found[place] = frozenset(numbers)
    return {place: keys for place, keys in found.items() if keys}


def restored(index: CheckpointIndex, item: Selected, known: IntegerKeys) -> Selected:
    """``item`` with `MapKey` for what was an integer, also where it was renamed."""
    if not known:
        return item
    path = index.path_of(item.entry.key)
    marked = tuple(
        MapKey(part) if isinstance(part, str) and part in known.get(path[:depth], ()) else part
        for depth, part in enumerate(path)
    )
    return replace(item, path=marked if item.path == path else repath(marked, item.key))


def dropped(index: CheckpointIndex, chosen: Iterable[Selected]) -> Iterator[Finding]:
    """Containers that were empty and are therefore not in the checkpoint, as far as that can be seen."""
    if index.paths is None:
        return
    touched: set[Place] = set()
    for item in chosen:
        path = index.path_of(item.entry.key)
        touched.update(path[:depth] for depth in range(len(path) + 1))
    children: dict[Place, set[PathPart]] = defaultdict(set)
    for key in index.entries:
        path = index.path_of(key)
        for depth, part in enumerate(path):
            children[path[:depth]].add(part)
    for place, parts in children.items():
        positions = {part for part in parts if isinstance(part, int)}
        missing = max(positions) + 1 - len(positions) if positions else 0
        if place in touched and missing and positions == parts:
            first = [i for i in range(max(positions) + 1) if i not in positions][:_SHOWN]
            where = ", ".join(map(str, first)) + (", …" if missing > _SHOWN else "")
            yield finding(
                "export.dropped-empty",
                f"{dotted(place)}: {missing} of {max(positions) + 1} items were empty dicts, which saving "
                f"drops (at {where}); there is None",
                key=dotted(place),
                positions=first,
                count=missing,
            )
    for owner in _groups(index):
        if (*owner, "param_groups") in touched and "state" not in children[owner]:
            name = dotted((*owner, "state"))
            yield finding(
                "export.dropped-empty",
                f"{name} is not in the checkpoint although its optimizer is: one that keeps no state has an "
                f"empty dict there, which saving drops. load_state_dict wants it: add {{}}",
                key=name,
            )


def left_gaps(index: CheckpointIndex, chosen: Sequence[Selected]) -> Iterator[Finding]:
    """Items of lists that were not chosen while later ones were: None takes their place."""
    if len(chosen) == len(index.entries):
        return
    held: dict[Place, set[PathPart]] = defaultdict(set)
    for item in chosen:
        path = index.path_of(item.entry.key)
        for depth, part in enumerate(path):
            held[path[:depth]].add(part)
    there: dict[Place, set[int]] = defaultdict(set)
    for key in index.entries:
        path = index.path_of(key)
        for depth, part in enumerate(path):
            if isinstance(part, int) and path[:depth] in held:
                there[path[:depth]].add(part)
    for place, positions in there.items():
        last = max((part for part in held[place] if isinstance(part, int)), default=-1)
        missing = sorted(part for part in positions - held[place] if part < last)
        if missing and all(isinstance(part, int) for part in held[place]):
            first = missing[:_SHOWN]
            where = ", ".join(map(str, first)) + (", …" if len(missing) > _SHOWN else "")
            yield finding(
                "export.list-gap",
                f"{dotted(place)}: {len(missing)} of {last + 1} items are not selected (at {where}); "
                f"there is None",
                key=dotted(place),
                positions=first,
                count=len(missing),
            )


def _groups(index: CheckpointIndex) -> dict[Place, list[ObjectEntry]]:
    """By optimizer, the objects that list its parameters: those of its groups, or all groups in one."""
    found: dict[Place, list[ObjectEntry]] = defaultdict(list)
    for entry in index.objects:
        path = index.path_of(entry.key)
        if path[-1] == "param_groups":
            found[path[:-1]].append(entry)
        elif len(path) > 2 and path[-3] == "param_groups" and path[-1] == "params" and type(path[-2]) is int:
            found[path[:-3]].append(entry)
    return found


def _numbered(index: CheckpointIndex, chosen: Iterable[Selected], name: str) -> dict[Place, set[str]]:
    """Maps of this name, with those of their keys that are spelled as an integer is."""
    found: dict[Place, set[str]] = defaultdict(set)
    for item in chosen:
        path = index.path_of(item.entry.key)
        for depth in range(1, len(path)):
            part = path[depth]
            if path[depth - 1] == name and isinstance(part, str) and _is_number(part):
                found[path[:depth]].add(part)
    return found


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19 and str(int(text)) == text


def _integers(value: Value) -> Iterator[int]:
    """Parameters that are listed by number, in one group or in a list of groups."""
    if not isinstance(value, list):
        return
    for item in value:
        if type(item) is int:
            yield item
        elif isinstance(item, dict):
            yield from _integers(item.get("params"))
