"""An object as a stream, read once from front to back and hashed on the way."""

from __future__ import annotations

import hashlib
import io

from dcp.storage.store import Store

BLOCK = 8 << 20
"""Bytes of one request."""


class HashingReader(io.RawIOBase):
    """Sequential reader of one object; `digest` is of what has been read so far.

    Wrap it in `io.BufferedReader` (see `open_reader`): every read here is a request.
    """

    def __init__(self, store: Store, name: str, size: int) -> None:
        super().__init__()
        self._store = store
        self._name = name
        self._left = size
        self._position = 0
        self._hash = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        view = memoryview(buffer)[: min(len(buffer), self._left)]
        if view:
            self._store.read_into(self._name, self._position, [view])
            self._hash.update(view)
            self._position += len(view)
            self._left -= len(view)
        return len(view)

    def digest(self) -> bytes:
        """SHA-256 of the object, once all of it has been read."""
        while self.read(BLOCK):
            pass
        return self._hash.digest()


def open_reader(store: Store, name: str, size: int) -> tuple[io.BufferedReader, HashingReader]:
    """A buffered stream of an object of ``size`` bytes, and the raw reader under it that knows the digest.

    Reading raises `StorageError`, and `CheckpointError` (``files.truncated``) if the object is shorter.
    """
    raw = HashingReader(store, name, size)
    return io.BufferedReader(raw, min(BLOCK, max(size, 1))), raw
