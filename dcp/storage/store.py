"""`Store`: the few verbs everything else does I/O with, and the values they exchange.

A store is a prefix. Every name is relative to it, so nothing reached through a store lies outside it.
Implementations: `dcp.storage.local` and `dcp.storage.remote`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from dcp.errors import CheckpointError, NotFoundError


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a listing says of one object."""

    name: str
    """Relative to the store, ``/`` between parts."""
    size: int
    """Bytes."""
    modified: float | None
    """Last modification, seconds since the epoch; None where the store does not tell."""
    identity: str
    """Changes whenever the content is written again: generation, ETag or modification time in ns."""
    crc32c: str | None = None
    """What the store says the content's CRC-32C is, 8 hexadecimal digits; None where it does not tell."""


Held = Callable[[], None]
"""Raises `BusyError` if a claim has been lost."""


class Sink(Protocol):
    """Where streamed output goes: it only takes bytes, in order."""

    def write(self, data: bytes | bytearray | memoryview, /) -> int: ...


class Store(ABC):
    """A prefix in some storage.

    Every verb raises leaves of `StorageError`; those that are safe to repeat are retried, bounded,
    before `UnreachableError` is raised.
    """

    url: str
    """Location of the prefix, without a trailing slash."""
    options: Mapping[str, Any]
    """fsspec options the store was opened with."""
    holds_writers: bool = False
    """Whether unfinished writers take no memory, so that many objects can be kept back to appear together."""

    def claimed(self, name: str) -> AbstractContextManager[Held]:
        """Keep the prefix ``name`` for one writer until the block ends.

        What a writer that was killed had claimed is free again. In a bucket, where another machine's
        processes cannot be seen, that takes minutes; one that slept so long learns it from what this gives:
        to be called before anything is made to stand for all that was written.

        A store that cannot tell who else is writing keeps nobody out.

        Raises:
            BusyError: somebody else has it.
        """
        return nullcontext(lambda: None)

    @abstractmethod
    def child(self, name: str) -> Store:
        """The store of the prefix ``name`` below this one; nothing is checked or created."""

    @abstractmethod
    def objects(self) -> list[ObjectInfo]:
        """All objects below the prefix, at any depth, sorted by name.

        Raises:
            NotFoundError: there is nothing at the prefix.
        """

    @abstractmethod
    def directories(self) -> list[str]:
        """Names of the direct sub-prefixes, sorted. Raises `NotFoundError` as `objects` does."""

    @abstractmethod
    def info(self, name: str) -> ObjectInfo:
        """One object's entry, fresh from the store."""

    @abstractmethod
    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Bytes ``start <= i < end`` of an object, exactly.

        Raises:
            CheckpointError: ``files.truncated`` where the object ends before ``end``.
        """

    def read_into(self, name: str, start: int, views: Sequence[memoryview]) -> None:
        """Fill ``views``, one after another, with the bytes from ``start`` on. Raises as `read_range`."""
        data = memoryview(self.read_range(name, start, start + sum(len(view) for view in views)))
        for view in views:
            view[:] = data[: len(view)]
            data = data[len(view) :]

    @abstractmethod
    def create(self, name: str, data: bytes) -> None:
        """Write a small object only if it does not exist, atomically, also between processes.

        Raises:
            AlreadyExistsError: it exists; nothing was written.
        """

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Write a small object whole, whether or not it exists."""

    @abstractmethod
    def writer(self, name: str) -> AbstractContextManager[Sink]:
        """Stream an object. It appears under its name when the block ends, and not at all if it raises."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Delete one object; an absent one is not an error."""

    def prune(self) -> None:
        """Remove directories that hold nothing, this one too, where prefixes are directories at all."""
        return

    def unfinished(self) -> Iterable[tuple[str, float | None]]:
        """Hidden names directly below the prefix of what is not finished, and when it was last written.

        Only where `claimed` needs them.
        """
        return ()

    def sweep(self) -> None:  # noqa: B027 - most stores keep what is unfinished to themselves
        """Remove what writers that were killed left unfinished directly below the prefix."""

    def exists(self, name: str) -> bool:
        """Whether the object exists now."""
        try:
            self.info(name)
        except NotFoundError:
            return False
        return True

    def read(self, name: str, limit: int) -> bytes:
        """A whole object of at most ``limit`` bytes.

        Raises:
            CheckpointError: the object is larger; sizes in a bucket are not trusted with memory.
        """
        size = self.info(name).size
        if size > limit:
            raise CheckpointError(
                f"{name} is {size} bytes, more than the {limit} allowed for it",
                code="metadata.unsupported",
                file=name,
                actual=size,
                expected=limit,
            )
        return self.read_range(name, 0, size) if size else b""


def truncated(name: str, start: int, end: int, got: int) -> CheckpointError:
    """The error of a read that ended early."""
    return CheckpointError(
        f"{name} ends at byte {start + got}, but bytes {start} to {end} were needed",
        code="files.truncated",
        file=name,
        offset=start,
        expected=end - start,
        actual=got,
    )
