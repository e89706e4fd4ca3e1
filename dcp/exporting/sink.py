"""Counting and hashing what goes out, beside the write and not before it."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from dcp.storage import Sink

_SMALL = 1 << 16


class HashingSink:
    """Passes bytes on and computes SHA-256 and CRC32C; large pieces are hashed while they are written."""

    def __init__(self, inner: Sink) -> None:
        import google_crc32c

        self.inner = inner
        self.size = 0
        """Bytes written."""
        self._sha256 = hashlib.sha256()
        self._crc32c: Any = google_crc32c.Checksum()  # type: ignore[no-untyped-call]
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hash")

    def __enter__(self) -> HashingSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    def write(self, data: bytes | bytearray | memoryview, /) -> int:
        size = len(data)
        if size < _SMALL:
            self._update(data)
            self.inner.write(data)
        else:
            hashed = self._pool.submit(self._update, data)
            try:
                self.inner.write(data)
            finally:
                hashed.result()
        self.size += size
        return size

    def _update(self, data: bytes | bytearray | memoryview) -> None:
        self._sha256.update(data)
        # Its C function takes bytes only; hashing in steps keeps the copies small.
        for start in range(0, len(data), _SMALL):
            self._crc32c.update(bytes(data[start : start + _SMALL]))

    @property
    def sha256(self) -> str:
        """64 hexadecimal digits."""
        return self._sha256.hexdigest()

    @property
    def crc32c(self) -> str:
        """8 hexadecimal digits."""
        return bytes(self._crc32c.digest()).hex()
