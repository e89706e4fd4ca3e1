"""What stands in the directory of a safetensors export: an older export, and what killed ones have left.

Shards have the usual names where nothing stands. Beside an older export they have names of their own, which
carry a digest of their content: so nothing of it is touched before its index is replaced, which is one step.
Only an equal export is written over, by the same bytes. What the index does not lead to is nobody's, and the
next export into the directory removes it; one that another program wrote only once its own index stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dcp.errors import CheckpointError, ForbiddenError, NotFoundError, StorageError
from dcp.exporting.safetensors_layout import INDEX, Shard, index_of, named_by, tagged
from dcp.safetensors_file import read_header
from dcp.storage import ObjectInfo, Store

INDEX_LIMIT = 1 << 30
"""Most bytes of an index that is looked into."""
_USUAL = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_TAGGED = re.compile(r"model-[0-9a-f]{8}-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True, slots=True)
class Standing:
    """What a directory holds."""

    index: bytes | None = None
    """None where there is none; empty where it cannot be read."""
    named: frozenset[str] = frozenset()
    """Files that the index leads to."""
    abandoned: tuple[str, ...] = ()
    """Shards of exports that were killed before their index stood, or before they had cleared up."""
    others: tuple[str, ...] = ()
    """Shards that no index leads to and that another program may have written."""

    def named_apart(self, shards: Sequence[Shard], metadata: Mapping[str, str]) -> list[Shard]:
        """``shards`` under names that no other export has here."""
        if self.index is None and not self.others:
            return list(shards)
        return list(shards) if self.index == index_of(shards, metadata) else tagged(shards)


def look(inside: Store) -> Standing:
    """What stands in a directory, as far as it may be seen.

    Raises:
        StorageError: storage failed.
    """
    try:
        listed = inside.objects()
    except NotFoundError:
        return Standing()
    except ForbiddenError:
        # Who may write need not be allowed to list.
        listed = []
    index = _index(inside) if not listed or any(info.name == INDEX for info in listed) else None
    named = _named(index)
    # Beside an index that cannot be read nobody can tell what is whose.
    free = [info for info in listed if info.name not in named] if index is None or named else []
    abandoned = tuple(info.name for info in free if _is_ours(inside, info))
    others = tuple(i.name for i in free if _USUAL.fullmatch(i.name) and i.name not in abandoned)
    return Standing(index, named, abandoned, others)


def _index(inside: Store) -> bytes | None:
    try:
        return inside.read(INDEX, INDEX_LIMIT)
    except NotFoundError:
        return None
    except (ForbiddenError, CheckpointError):
        return b""


def _named(index: bytes | None) -> frozenset[str]:
    """Files that an index leads to; none where it is damaged."""
    try:
        return named_by(index) if index else frozenset()
    except ValueError:
        return frozenset()


def _is_ours(inside: Store, info: ObjectInfo) -> bool:
    """Whether a file is a shard that was written here: its header names the checkpoint's fingerprint."""
    if not _USUAL.fullmatch(info.name):
        return _TAGGED.fullmatch(info.name) is not None
    try:
        return "fingerprint" in read_header(inside, info)[1]
    except (CheckpointError, NotFoundError):
        return False


def clear(inside: Store) -> Standing:
    """Remove what dead writers left, to be called by who has claimed the directory; what stands is returned.

    Raises:
        StorageError: storage failed.
    """
    # Who may write need not be allowed to list, or to remove.
    with suppress(ForbiddenError):
        inside.sweep()
    standing = look(inside)
    with suppress(ForbiddenError):
        for name in standing.abandoned:
            inside.remove(name)
    return standing


def clear_replaced(inside: Store, shards: Iterable[Shard]) -> None:
    """Remove all shards but these, whose index stands. What cannot be removed now the next export removes."""
    kept = {shard.name.rpartition("/")[2] for shard in shards}
    with suppress(StorageError):
        for info in inside.objects():
            if (_USUAL.fullmatch(info.name) or _TAGGED.fullmatch(info.name)) and info.name not in kept:
                inside.remove(info.name)


def withdraw(store: Store, names: Sequence[str]) -> None:
    """Remove files of a failed export; the failure itself is what matters.

    What the index beside them leads to stays: an equal export stood there before, and is whole.
    """
    with suppress(StorageError):
        directory = names[0].rpartition("/")[0] if names else ""
        index = _index(store.child(directory)) if directory else None
        if index == b"":
            return
        kept = _named(index)
        for name in names:
            if name.rpartition("/")[2] not in kept:
                store.remove(name)
