"""Which keys go out, and under which path of the nested state dict. Pure values from the index.

A key's *path* is where it stood when it was saved (`planner_data`). Selecting works on the dotted key;
renaming works on the dotted key too and keeps as much of the path's nesting as the new name still has.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dcp.errors import MetadataError, UsageError
from dcp.exporting.renaming import Rule, parse_rename, renamed
from dcp.index import METADATA, CheckpointIndex, Entry, PathPart

DEEPEST = 400
"""Most levels of nesting: torch itself saves no deeper state, and gives up loading one that is far deeper."""

LONGEST_LIST = 1 << 20
"""Most items that lists may have beyond those that hold values: their lengths are numbers from the index."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What to take and how to call it."""

    include: tuple[str, ...] = ()
    """Globs on dotted keys, of which one must match; empty takes all."""
    exclude: tuple[str, ...] = ()
    """Globs on dotted keys, of which none may match."""
    rename: tuple[Rule, ...] = ()
    """Applied in order."""
    strip_prefix: str | None = None
    """Taken off the front of every key; after it, renames apply. All selected keys must have it."""

    @classmethod
    def of(
        cls,
        include: Sequence[str],
        exclude: Sequence[str],
        rename: Sequence[str],
        strip_prefix: str | None,
    ) -> Selection:
        """From what users write, rules as ``REGEX=>TEXT``. Raises `UsageError` where one makes no sense."""
        rules = tuple(parse_rename(rule) for rule in rename)
        return cls(tuple(include), tuple(exclude), rules, strip_prefix)


@dataclass(frozen=True, slots=True)
class Selected:
    """One key of the output."""

    entry: Entry
    key: str
    """Dotted name in the output."""
    path: tuple[PathPart, ...]
    """Place in the nested output; integers are list positions."""


def select(index: CheckpointIndex, selection: Selection, *, url: str = "URL") -> list[Selected]:
    """Apply a selection, in the index's order.

    Args:
        index: of the checkpoint.
        selection: what to take of it.
        url: where it is, for the command that lists its keys.

    Raises:
        UsageError: nothing matches, a pattern that is given matches nothing, or two keys get one name.
        MetadataError: the recorded paths contradict each other.
    """
    listed = f"see them with: ckpt inspect {shlex.quote(url)}"
    chosen = [entry for key, entry in index.entries.items() if taken(key, selection)]
    for glob in selection.include:
        if not any(fnmatchcase(key, glob) for key in index.entries):
            raise UsageError(f"--include {glob!r} matches none of the keys; {listed}")
    if not chosen and index.entries:
        raise UsageError(f"no key is left of {len(index.entries)}; {listed}")
    paths = [index.path_of(entry.key) for entry in chosen]
    old = [dotted(path) for path in paths]
    new = renamed([_stripped(name, selection.strip_prefix) for name in old], selection.rename)
    for before, after in zip(old, new, strict=True):
        if before and not after:
            raise UsageError(f"{before!r} would have no name left")
    result = [
        Selected(entry, after, path if after == before else repath(path, after))
        for entry, path, before, after in zip(chosen, paths, old, new, strict=True)
    ]
    _require_distinct(index, result)
    _require_tree(index, result)
    return result


def taken(key: str, selection: Selection) -> bool:
    """Whether a selection takes the key."""
    if any(fnmatchcase(key, glob) for glob in selection.exclude):
        return False
    return not selection.include or any(fnmatchcase(key, glob) for glob in selection.include)


def _stripped(name: str, prefix: str | None) -> str:
    if prefix and not name.startswith(prefix):
        raise UsageError(
            f"{name!r} does not begin with {prefix!r}; leave such keys out: --include '{prefix}*'"
        )
    return name.removeprefix(prefix or "")


def dotted(path: Sequence[PathPart]) -> str:
    """The flattened name of a path, as torch makes it."""
    return ".".join(map(str, path))


def repath(path: tuple[PathPart, ...], name: str) -> tuple[PathPart, ...]:
    """The path for a new dotted name: parts of the old one that still stand at either end are kept.

    What is between them becomes one part: ``("model", "a.w")`` renamed ``"net.a.w"`` is ``("net", "a.w")``.
    The path spells the name, whatever that is.
    """
    tail: list[PathPart] = []
    rest: str | None = name  # None where nothing is left; what is empty is a part of its own
    parts = list(path)
    while parts and rest is not None and f".{rest}".endswith(f".{parts[-1]}"):
        part = parts.pop()
        tail.insert(0, part)
        rest = _without(rest, part, rest[: -len(str(part)) - 1])
    head: list[PathPart] = []
    for part in parts:
        if rest is None or not f"{rest}.".startswith(f"{part}."):
            break
        head.append(part)
        rest = _without(rest, part, rest[len(str(part)) + 1 :])
    return (*head, *([] if rest is None else [rest]), *tail)


def _without(name: str, part: PathPart, rest: str) -> str | None:
    """What is left of a name that begins or ends with ``part``."""
    return None if name == str(part) else rest


def _require_distinct(index: CheckpointIndex, chosen: Iterable[Selected]) -> None:
    seen: dict[str, Selected] = {}
    for item in chosen:
        other = seen.setdefault(item.key, item)
        if other is not item:
            if dotted(index.path_of(other.entry.key)) == dotted(index.path_of(item.entry.key)):
                raise _contradiction(
                    f"{other.entry.key!r} and {item.entry.key!r} are both recorded at {item.key!r}"
                )
            raise UsageError(f"{other.entry.key!r} and {item.entry.key!r} would both be called {item.key!r}")


def _require_tree(index: CheckpointIndex, chosen: Sequence[Selected]) -> None:
    """No path may lead through another's value, and lists must be about as long as there are values."""
    leaves = {item.path: item for item in chosen}
    longest: dict[tuple[PathPart, ...], int] = {}
    for item in chosen:
        if len(item.path) > DEEPEST:
            raise MetadataError(
                f"{item.entry.key[:100]!r} lies {len(item.path):,} levels deep; beyond {DEEPEST} no program "
                f"loads the file again",
                code="metadata.unsupported",
                key=item.entry.key,
                file=METADATA,
            )
        for depth, part in enumerate(item.path):
            above = item.path[:depth]
            if above in leaves:
                other = leaves[above]
                if any(one.path != index.path_of(one.entry.key) for one in (item, other)):
                    raise UsageError(
                        f"{item.entry.key!r} would be called {item.key!r}, inside {other.entry.key!r}, "
                        f"which is called {other.key!r}"
                    )
                raise _contradiction(f"{item.entry.key!r} lies inside {other.entry.key!r}")
            if isinstance(part, int):
                if not 0 <= part < LONGEST_LIST:
                    raise _contradiction(f"{item.entry.key!r}: list position {part}")
                longest[above] = max(longest.get(above, 0), part + 1)
    if sum(longest.values()) > LONGEST_LIST + len(chosen):
        raise _contradiction(f"lists of {sum(longest.values())} items in all hold {len(chosen)} values")


def _contradiction(why: str) -> MetadataError:
    return MetadataError(
        f"the recorded paths contradict each other: {why}", code="metadata.unreadable", file=METADATA
    )
