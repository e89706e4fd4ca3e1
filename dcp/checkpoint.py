"""A checkpoint as it stands in storage: its objects, its index, its fingerprint.

`survey` lists a prefix and says what it holds (`Kind`) without judging it; `open_checkpoint` reads the
index too and gives a `Checkpoint`, on which every check, load and export works.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from os import PathLike
from typing import Any

from dcp.errors import MetadataError, NotFoundError, NotLoadableError
from dcp.findings import Finding, finding
from dcp.foreign import describe_foreign
from dcp.index import METADATA, CheckpointIndex, merge, parse
from dcp.storage import ObjectInfo, Store, open_reader, open_store

_RANK_LOCAL = re.compile(r"__(\d+)\.metadata")


class Kind(Enum):
    """What a prefix looks like from its object names."""

    COMMITTED = "committed"
    """`.metadata` stands at the top."""
    RANK_LOCAL = "rank-local"
    """One `__R.metadata` a rank, from a save without collectives."""
    PARTS = "parts"
    """No index at the top, but sub-prefixes that have one."""
    UNCOMMITTED = "uncommitted"
    """Data files or nothing at all, and no index: being written, or abandoned."""
    FOREIGN = "foreign"
    """Files of some other format."""


@dataclass(frozen=True)
class Survey:
    """A listing and what it looks like.

    Whoever asks several things of one checkpoint makes one of it and hands it on: its index is read once,
    at first need, and kept as long as the survey is.
    """

    store: Store
    objects: Mapping[str, ObjectInfo]
    """Every object below the prefix by its name relative to it."""

    @cached_property
    def kind(self) -> Kind:
        names = self.objects
        if METADATA in names:
            return Kind.COMMITTED
        if self.rank_files:
            return Kind.RANK_LOCAL
        if self.parts:
            return Kind.PARTS
        if not names or self.begun:
            return Kind.UNCOMMITTED
        if any(is_data_file(name) or name.startswith(f"{METADATA}.") for name in names):
            return Kind.UNCOMMITTED
        return Kind.FOREIGN

    @cached_property
    def rank_files(self) -> Mapping[int, str]:
        """Rank-local index objects by rank."""
        matches = ((_RANK_LOCAL.fullmatch(name), name) for name in self.objects)
        return dict(sorted((int(match[1]), name) for match, name in matches if match))

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Direct sub-prefixes that hold a committed checkpoint."""
        tops = {name.partition("/")[0] for name in self.objects if "/" in name}
        return tuple(
            sorted(
                top
                for top in tops
                if f"{top}/{METADATA}" in self.objects or f"{top}/__0{METADATA}" in self.objects
            )
        )

    @cached_property
    def begun(self) -> tuple[str, ...]:
        """Direct sub-prefixes that hold data files, as a checkpoint does, but no index."""
        tops = {name.partition("/")[0] for name in self.objects if is_data_file(name.partition("/")[2])}
        return tuple(sorted(tops.difference(self.parts)))

    @cached_property
    def last_change(self) -> float | None:
        """Latest modification of any object, seconds since the epoch; None if nothing tells."""
        times = [info.modified for info in self.objects.values() if info.modified is not None]
        return max(times, default=None)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint it lists, with the index read. Raises as `open_checkpoint`."""
        return _opened(self)

    def part(self, name: str) -> Survey:
        """The survey of a sub-prefix, from the same listing; the same one whenever it is asked for."""
        if name not in self._surveyed:
            prefix = f"{name}/"
            below = {
                key.removeprefix(prefix): ObjectInfo(key.removeprefix(prefix), o.size, o.modified, o.identity)
                for key, o in self.objects.items()
                if key.startswith(prefix)
            }
            self._surveyed[name] = Survey(self.store.child(name), below)
        return self._surveyed[name]

    @cached_property
    def _surveyed(self) -> dict[str, Survey]:
        """Surveys of parts, by name."""
        return {}

    @property
    def listing_identity(self) -> str:
        """Digest of names, sizes and identities: changes whenever anything is written, costs no read."""
        return _digest(self.objects.values()).hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint with its index read."""

    store: Store
    objects: Mapping[str, ObjectInfo]
    """Every object below the prefix, as listed before the index was read."""
    index: CheckpointIndex
    index_files: tuple[str, ...]
    """`.metadata`, or the `__R.metadata` objects that were merged."""
    fingerprint: str
    """64 hexadecimal digits; see `fingerprint_of`."""

    @property
    def url(self) -> str:
        return self.store.url


def is_data_file(name: str) -> bool:
    """Whether an object at the top of a checkpoint is a DCP data file by its name."""
    return "/" not in name and name.endswith(".distcp")


def survey(url: str | PathLike[str] | Store | Survey, **options: Any) -> Survey:
    """List a prefix; what is a survey already is given back.

    Raises:
        NotFoundError: there is nothing at ``url``.
        StorageError: it could not be listed.
    """
    if isinstance(url, Survey):
        return url
    store = open_store(url, **options) if isinstance(url, str | PathLike) else url
    return Survey(store, {info.name: info for info in store.objects()})


def open_checkpoint(url: str | PathLike[str] | Store | Survey, **options: Any) -> Checkpoint:
    """List a checkpoint and read its index, unless a survey has; nothing else is read or checked.

    Raises:
        UsageError: there is no filesystem for ``url``.
        MetadataError: the index is unusable.
        NotLoadableError: there is no index (``incomplete.no-metadata`` or ``metadata.unsupported``).
        StorageError: the store failed.
    """
    return survey(url, **options).checkpoint


def _opened(found: Survey) -> Checkpoint:
    if found.kind is Kind.COMMITTED:
        files: tuple[str, ...] = (METADATA,)
        index, digest = _read_index(found, METADATA)
    elif found.kind is Kind.RANK_LOCAL:
        files = tuple(found.rank_files.values())
        parts: list[tuple[int, CheckpointIndex]] = []
        digest = b""
        for rank, name in found.rank_files.items():
            part, part_digest = _read_index(found, name)
            parts.append((rank, part))
            digest += part_digest
        index = merge(parts)
    else:
        raise _no_index(found)
    return Checkpoint(
        found.store, found.objects, index, files, fingerprint_of(found.objects.values(), digest)
    )


def _read_index(found: Survey, name: str) -> tuple[CheckpointIndex, bytes]:
    """An index object parsed, and the SHA-256 of its content. Its size is the listing's, so it is real."""
    stream, raw = open_reader(found.store, name, found.objects[name].size)
    return parse(stream, name), raw.digest()


def changes(checkpoint: Checkpoint) -> list[Finding]:
    """What was written, changed or removed since the checkpoint was listed: then nothing read of it counts.

    Raises:
        StorageError: it cannot be listed any more.
    """
    try:
        now = {info.name: info for info in checkpoint.store.objects()}
    except NotFoundError:
        now = {}
    before = checkpoint.objects
    changed = sorted(name for name in {*now, *before} if now.get(name) != before.get(name))
    if not changed:
        return []
    return [
        finding(
            "files.newer-than-metadata",
            f"{len(changed)} objects changed while the checkpoint was being read, first {changed[0]}",
            file=changed[0],
            files=changed[:100],
        )
    ]


def _no_index(found: Survey) -> NotLoadableError | MetadataError:
    url = found.store.url
    if found.kind is Kind.PARTS:
        names = ", ".join(found.parts)
        return MetadataError(
            f"{url} is a step of several checkpoints ({names}); name one, e.g. {url}/{found.parts[0]}",
            code="metadata.unsupported",
        )
    if found.kind is Kind.UNCOMMITTED:
        message = f"{url} has no {METADATA}: the save was interrupted or is still running"
        return NotLoadableError(message, [finding("incomplete.no-metadata", message, file=METADATA)])
    message = f"{url} has no {METADATA} and no .distcp files: it is {describe_foreign(url, found.objects)}"
    return NotLoadableError(message, [finding("metadata.unsupported", message)])


def read_index(url: str | PathLike[str], **options: Any) -> CheckpointIndex:
    """The index of the checkpoint at ``url``; nothing else is read.

    Args:
        url: the checkpoint.
        options: passed to the filesystem.

    Raises:
        UsageError, MetadataError, NotLoadableError, StorageError: as `open_checkpoint`.
    """
    return open_checkpoint(url, **options).index


def fingerprint_of(objects: Iterable[ObjectInfo], index_digest: bytes = b"") -> str:
    """Identity of a step's bytes: digest of the index's content and every object's name, size and identity.

    Args:
        objects: all objects of the step, in any order.
        index_digest: SHA-256 of `.metadata`, or of each `__R.metadata` in turn; empty if there is none.
    """
    digest = _digest(objects)
    digest.update(index_digest)
    return digest.hexdigest()


def fingerprint_of_step(found: Survey, parts: Sequence[Checkpoint]) -> str:
    """The fingerprint of a step: its checkpoint's own, or one of all its parts and everything beside them."""
    if found.kind is not Kind.PARTS:
        return parts[0].fingerprint
    return fingerprint_of(found.objects.values(), b"".join(part.fingerprint.encode() for part in parts))


def _digest(objects: Iterable[ObjectInfo]) -> hashlib._Hash:
    digest = hashlib.sha256()
    for info in sorted(objects, key=lambda o: o.name):
        digest.update(f"{info.name}\0{info.size}\0{info.identity}\n".encode("utf-8", "surrogateescape"))
    return digest
