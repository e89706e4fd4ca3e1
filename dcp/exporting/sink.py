"""Checksums of what goes out, taken beside the write and not before it.

`ChecksumSink` takes the CRC-32C, which costs next to nothing. `HashingSink` takes SHA-256 too, which a
manifest names but one core computes more slowly than a disk writes: who needs none does not pay for it.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from dcp.exporting.report import ExportedFile
from dcp.storage import Sink

_SMALL = 1 << 16
"""Bytes for which no other thread is asked."""
_STEP = 1 << 18


class ChecksumSink:
    """Passes bytes on; large pieces are checksummed while they are written."""

    def __init__(self, inner: Sink) -> None:
        self.inner = inner
        self.size = 0
        """Bytes written."""
        self._crc32c = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checksum")

    def __enter__(self) -> Self:
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
            summed = self._pool.submit(self._update, data)
            try:
                self.inner.write(data)
            finally:
                summed.result()
        self.size += size
        return size

    def _update(self, data: bytes | bytearray | memoryview) -> None:
        import google_crc32c

        # Its C function takes bytes only; in steps the copies stay in the core's cache.
        for start in range(0, len(data), _STEP):
            self._crc32c = google_crc32c.extend(self._crc32c, bytes(data[start : start + _STEP]))

    @property
    def crc32c(self) -> str:
        """8 hexadecimal digits."""
        return f"{self._crc32c:08x}"

    def written_as(self, name: str) -> ExportedFile:
        """The file ``name`` that all of this went to."""
        return ExportedFile(name=name, size=self.size, crc32c=self.crc32c)


class HashingSink(ChecksumSink):
    """Takes SHA-256 as well."""

    def __init__(self, inner: Sink) -> None:
        super().__init__(inner)
        self._sha256 = hashlib.sha256()

    def _update(self, data: bytes | bytearray | memoryview) -> None:
        self._sha256.update(data)
        super()._update(data)

    @property
    def sha256(self) -> str:
        """64 hexadecimal digits."""
        return self._sha256.hexdigest()

    def written_as(self, name: str) -> ExportedFile:
        return ExportedFile(name=name, size=self.size, crc32c=self.crc32c, sha256=self.sha256)
