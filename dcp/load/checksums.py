"""CRCs of chunks that arrive in pieces: each piece's computed where it is read, joined where it is used.

`Summing` computes the CRC of announced parts of a range in the thread that reads it, on another core than
the one that copies and compares, and while the bytes are still in that core's cache.
`Checksums` follows each chunk from its first byte to its last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from isal import isal_zlib

from dcp.errors import CheckpointError, NotFoundError
from dcp.index import Chunk
from dcp.load.buffers import Buffers
from dcp.load.needs import ChunkNeed
from dcp.records import Located
from dcp.storage import ByteRange, Store


class Summing:
    """Reads ranges and computes CRCs of them, where it was told to. Safe between threads."""

    def __init__(self, store: Store, buffers: Buffers) -> None:
        self._store = store
        self._buffers = buffers
        self._announced: dict[ByteRange, list[ByteRange]] = {}
        self._sums: dict[ByteRange, int] = {}

    def announce(self, requests: Iterable[ByteRange], parts: Iterable[ByteRange]) -> None:
        """The CRCs of ``parts`` will be wanted, each of which lies in one of the ``requests``."""
        waiting = sorted(parts, reverse=True)
        for request in sorted(requests):
            while waiting and waiting[-1].name == request.name and waiting[-1].end <= request.end:
                self._announced.setdefault(request, []).append(waiting.pop())

    def read(self, item: ByteRange) -> memoryview:
        """The range's bytes, in one of the buffers.

        Nothing where it cannot be had because of the checkpoint: one range must not end a parallel read of
        many, and what stands in it is then read alone, which tells whose fault it is.

        Raises:
            StorageError: the environment failed.
        """
        data = self._buffers.take(item.length)
        try:
            self._store.read_into(item.name, item.start, [data])
        except (CheckpointError, NotFoundError):
            self._buffers.give_back(data)
            return memoryview(b"")
        for part in self._announced.pop(item, ()):
            self._sums[part] = isal_zlib.crc32(data[part.start - item.start : part.end - item.start])
        return data

    def take(self, part: ByteRange, data: memoryview) -> int:
        """The CRC of ``part``, whose bytes are ``data``."""
        found = self._sums.pop(part, None)
        return isal_zlib.crc32(data) if found is None else found


@dataclass(slots=True)
class _Progress:
    """CRC over the first ``position`` bytes of a chunk; ``announced`` of its bytes have been asked for."""

    announced: int = 0
    position: int = 0
    crc32: int = 0


class Checksums:
    """Follows chunks that are read from their first byte to their last, in order."""

    def __init__(self) -> None:
        self._chunks: dict[tuple[str, Chunk], _Progress] = {}

    def announce(self, need: ChunkNeed, located: Located) -> ByteRange | None:
        """Bytes of the object whose CRC will be wanted, if the need continues the ones announced before."""
        progress = self._chunks.setdefault(need.place, _Progress())
        if not located.checkable or progress.announced != need.span.start:
            return None
        progress.announced = need.span.end
        return part_of(need, located)

    def advance(self, need: ChunkNeed, located: Located, crc32: int, tail: memoryview) -> None:
        """Join the CRC of a need's bytes.

        Args:
            tail: what was read behind them; at the chunk's end, its data descriptor.

        Raises:
            RecordError: ``records.corrupt``; the chunk is complete and its CRC is not the recorded one.
        """
        progress = self._chunks[need.place]
        progress.crc32 = isal_zlib.crc32_combine(progress.crc32, crc32, need.cost)
        progress.position = need.span.end
        if progress.position == located.nbytes:
            located.verify(bytes(tail), progress.crc32)

    def continues(self, need: ChunkNeed, located: Located) -> bool:
        """Whether the need's bytes follow those joined so far, of a chunk that can be checked."""
        progress = self._chunks.get(need.place)
        return located.checkable and progress is not None and progress.position == need.span.start


def part_of(need: ChunkNeed, located: Located) -> ByteRange:
    """The bytes of the object that a need of a direct chunk is for."""
    return ByteRange(located.name, located.start + need.span.start, located.start + need.span.end)
