"""Which keys go out, and under which path of the nested state dict. Pure values from the index.

A key's *path* is where it stood when it was saved (`planner_data`). Selecting works on the dotted key;
renaming works on the dotted key too and keeps as much of the path's nesting as the new name still has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dcp.errors import MetadataError, UsageError
from dcp.index import METADATA, CheckpointIndex, Entry, PathPart

LONGEST_LIST = 1 << 20
"""Most items of a list: its length is a number from the index."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What to take and how to call it."""

    include: tuple[str, ...] = ()
    """Globs on dotted keys, of which one must match; empty takes all."""
    exclude: tuple[str, ...] = ()
    """Globs on dotted keys, of which none may match."""
    rename: tuple[tuple[str, str], ...] = ()
    """(regular expression, replacement), applied in order with `re.sub`."""
    strip_prefix: str | None = None
    """Taken off the front of every key; after it, renames apply. All selected keys must have it."""


@dataclass(frozen=True, slots=True)
class Selected:
    """One key of the output."""

    entry: Entry
    key: str
    """Dotted name in the output."""
    path: tuple[PathPart, ...]
    """Place in the nested output; integers are list positions."""


def parse_rename(text: str) -> tuple[str, str]:
    """``REGEX=>TEXT`` as (regular expression, replacement).

    Raises:
        UsageError: it has no ``=>`` or the expression does not compile.
    """
    pattern, mark, replacement = text.partition("=>")
    if not mark:
        raise UsageError(f"rename {text!r} has no '=>'; write 'REGEX=>TEXT', e.g. '^module\\.=>'")
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(f"rename {text!r}: {pattern!r} is no regular expression: {error}") from None
    return pattern, replacement


def select(index: CheckpointIndex, selection: Selection) -> list[Selected]:
    """Apply a selection, in the index's order.

    Raises:
        UsageError: nothing matches, a pattern that is given matches nothing, or two keys get one name.
        MetadataError: the recorded paths contradict each other.
    """
    chosen = [entry for key, entry in index.entries.items() if _taken(key, selection)]
    for glob in selection.include:
        if not any(fnmatchcase(key, glob) for key in index.entries):
            raise UsageError(f"--include {glob!r} matches none of the keys; see them with: ckpt inspect")
    if not chosen and index.entries:
        raise UsageError(f"no key is left of {len(index.entries)}; see them with: ckpt inspect")
    result = [_renamed(entry, index.path_of(entry.key), selection) for entry in chosen]
    _require_distinct(result)
    _require_tree(result)
    return result


def _taken(key: str, selection: Selection) -> bool:
    if any(fnmatchcase(key, glob) for glob in selection.exclude):
        return False
    return not selection.include or any(fnmatchcase(key, glob) for glob in selection.include)


def _renamed(entry: Entry, path: tuple[PathPart, ...], selection: Selection) -> Selected:
    old = dotted(path)
    new = old
    if selection.strip_prefix:
        if not new.startswith(selection.strip_prefix):
            raise UsageError(
                f"{old!r} does not begin with {selection.strip_prefix!r}; "
                f"leave such keys out: --include '{selection.strip_prefix}*'"
            )
        new = new.removeprefix(selection.strip_prefix)
    for pattern, replacement in selection.rename:
        try:
            new = re.sub(pattern, replacement, new)
        except (re.error, IndexError) as error:
            raise UsageError(f"rename {pattern!r} => {replacement!r}: {error}") from None
    if not new and old:
        raise UsageError(f"{old!r} would have no name left")
    return Selected(entry, new, path if new == old else repath(path, new))


def dotted(path: Sequence[PathPart]) -> str:
    """The flattened name of a path, as torch makes it."""
    return ".".join(map(str, path))


def repath(path: tuple[PathPart, ...], name: str) -> tuple[PathPart, ...]:
    """The path for a new dotted name: parts of the old one that still stand at either end are kept.

    What is between them becomes one part: ``("model", "a.w")`` renamed ``"net.a.w"`` is ``("net", "a.w")``.
    """
    tail: list[PathPart] = []
    rest = name
    parts = list(path)
    while parts and (rest == str(parts[-1]) or rest.endswith(f".{parts[-1]}")):
        part = parts.pop()
        tail.insert(0, part)
        rest = rest.removesuffix(str(part)).removesuffix(".")
    head: list[PathPart] = []
    for part in parts:
        if rest != str(part) and not rest.startswith(f"{part}."):
            break
        head.append(part)
        rest = rest.removeprefix(str(part)).removeprefix(".")
    middle: list[PathPart] = [rest] if rest else []
    return (*head, *middle, *tail)


def _require_distinct(chosen: Iterable[Selected]) -> None:
    seen: dict[tuple[PathPart, ...], Selected] = {}
    for item in chosen:
        other = seen.setdefault(item.path, item)
        if other is not item:
            raise UsageError(f"{other.entry.key!r} and {item.entry.key!r} would both be called {item.key!r}")


def _require_tree(chosen: Sequence[Selected]) -> None:
    """No path may lead through another's value, and list positions are bounded."""
    leaves = {item.path: item for item in chosen}
    for item in chosen:
        for depth, part in enumerate(item.path):
            above = item.path[:depth]
            if above in leaves:
                raise _contradiction(f"{item.entry.key!r} lies inside {leaves[above].entry.key!r}")
            if isinstance(part, int) and not 0 <= part < LONGEST_LIST:
                raise _contradiction(f"{item.entry.key!r}: list position {part}")


def _contradiction(why: str) -> MetadataError:
    return MetadataError(
        f"the recorded paths contradict each other: {why}", code="metadata.unreadable", file=METADATA
    )
