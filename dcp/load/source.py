"""Views of a store for loading: one that counts, one that remembers.

Each is a `Store` that only reads, put around another one. Counting is safe between threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from threading import Lock
from typing import NoReturn

from dcp.errors import UsageError
from dcp.storage import ByteRange, ObjectInfo, Sink, Store


class View(Store):
    """Another store, for reading only."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url
        self.options = inner.options

    def child(self, name: str) -> Store:
        return self.inner.child(name)

    def objects(self) -> list[ObjectInfo]:
        return self.inner.objects()

    def directories(self) -> list[str]:
        return self.inner.directories()

    def info(self, name: str) -> ObjectInfo:
        return self.inner.info(name)

    def read_range(self, name: str, start: int, end: int) -> bytes:
        return self.inner.read_range(name, start, end)

    def create(self, name: str, data: bytes) -> None:
        self._refuse(name)

    def replace(self, name: str, data: bytes) -> None:
        self._refuse(name)

    def writer(self, name: str) -> AbstractContextManager[Sink]:
        self._refuse(name)

    def remove(self, name: str) -> None:
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise UsageError(f"{self.url} was opened for reading; {name} cannot be written")


class Metered(View):
    """Counts what is read through it."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.bytes_read = 0
        """Bytes of all ranges read."""
        self.requests = 0
        """Number of ranges read."""
        self._lock = Lock()

    def read_range(self, name: str, start: int, end: int) -> bytes:
        data = self.inner.read_range(name, start, end)
        self._count(len(data))
        return data

    def read_into(self, name: str, start: int, views: Sequence[memoryview]) -> None:
        self.inner.read_into(name, start, views)
        self._count(sum(map(len, views)))

    def _count(self, size: int) -> None:
        with self._lock:
            self.bytes_read += size
            self.requests += 1


class Remembering(View):
    """Answers from ranges in memory where one holds what is asked for."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._held: dict[str, list[tuple[ByteRange, memoryview]]] = {}

    def hold(self, ranges: Iterable[tuple[ByteRange, memoryview]]) -> None:
        """Take these in place of what was held before."""
        self._held = {}
        for item, data in ranges:
            self._held.setdefault(item.name, []).append((item, data))

    def view(self, name: str, start: int, end: int) -> memoryview:
        """As `read_range`, without a copy of what is held."""
        for item, data in self._held.get(name, ()):
            if item.start <= start and end <= item.end:
                return data[start - item.start : end - item.start]
        return memoryview(self.inner.read_range(name, start, end))

    def read_range(self, name: str, start: int, end: int) -> bytes:
        return bytes(self.view(name, start, end))
