"""Bands filled with bytes, in order, by threads that read ahead; every source chunk's CRC checked on the way.

A fixed set of buffers goes round: memory is their number times a band, whatever the checkpoint's size. A
thread fills a buffer and takes the CRC of each piece; the consumer joins those in order, so that a chunk
read in pieces is checked as a whole against the CRC its record carries.
"""

from __future__ import annotations

import queue
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock, local

from isal import isal_zlib

from dcp.boxes import Shape
from dcp.dtypes import ITEMSIZE
from dcp.errors import CheckpointError
from dcp.exporting.bands import Band, Piece
from dcp.index import Chunk, TensorEntry
from dcp.records import Located, Records
from dcp.storage import reader_threads

LOCAL_BAND = 2 << 20
"""Bytes read at once from a disk: few enough to stay in the processor's cache until they are written."""
REMOTE_BAND = 8 << 20
"""Bytes read at once from a bucket, where each request takes its time."""

_Place = tuple[str, Shape]
"""A chunk by its key and offsets. Its record would not do: in a safetensors file records look alike."""


@dataclass(frozen=True, slots=True)
class Filled:
    """A band's bytes. ``view`` is valid until the next band is taken."""

    entry: TensorEntry
    band: Band
    view: memoryview
    crc32: int
    """Of ``view``."""
    faults: tuple[CheckpointError, ...] = ()
    """Why ``view`` cannot be believed: one a damaged chunk."""


@dataclass(frozen=True, slots=True)
class _Read:
    """One piece as it was read: its CRC, and the bytes behind the chunk if it was the chunk's last piece."""

    crc32: int
    tail: bytes


@dataclass(slots=True)
class _Progress:
    """A chunk that has been read in part: CRC of its first ``done`` bytes."""

    crc32: int = 0
    done: int = 0


class Pump:
    """Reads bands of one checkpoint.

    Attributes:
        bytes_read: bytes taken from storage for elements so far; heads of records are not counted.
        unchecked: records read whole whose bytes no CRC guards, by file.
    """

    def __init__(self, records: Records, *, band_bytes: int, threads: int) -> None:
        self.records = records
        self.band_bytes = band_bytes
        self.threads = threads
        self.bytes_read = 0
        self.unchecked: Counter[str] = Counter()
        self._buffers: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        self._scratch = local()
        self._lock = Lock()
        self._located: dict[_Place, Located] = {}
        self._decoded: dict[_Place, bytes] = {}
        self._progress: dict[_Place, _Progress] = {}

    @staticmethod
    def memory(band_bytes: int, threads: int) -> int:
        """Bytes that the buffers take: those going round, and one a thread to assemble from."""
        return (2 * threads + 2 + threads) * band_bytes

    def run(self, jobs: Iterable[tuple[TensorEntry, Band]]) -> Iterator[Filled]:
        """Yield each job filled, in order; a damaged record makes the bands that need it faulty.

        Raises:
            StorageError: the store failed.
        """
        ahead = 2 * self.threads + 1
        waiting: deque[_Job] = deque()
        for _ in range(ahead + 1):
            self._buffers.put(bytearray(self.band_bytes))
        with reader_threads(self.threads, "read") as pool:
            for entry, band in jobs:
                if len(waiting) == ahead:
                    yield from self._next(waiting)
                buffer = self._buffers.get()
                waiting.append((entry, band, buffer, pool.submit(self._fill, entry, band, buffer)))
            while waiting:
                yield from self._next(waiting)

    def _next(self, waiting: deque[_Job]) -> Iterator[Filled]:
        entry, band, buffer, future = waiting.popleft()
        yield self._settle(entry, band, buffer, future.result())
        self._buffers.put(buffer)

    def take(self, entry: TensorEntry, band: Band, buffer: bytearray) -> Filled:
        """Fill one band here and now; for callers that bring threads and buffers of their own.

        Args:
            entry: whose bands are taken in order, without another's between them.
            band: the next one.
            buffer: at least as long as the band.
        """
        return self._settle(entry, band, buffer, self._fill(entry, band, buffer))

    def _settle(
        self, entry: TensorEntry, band: Band, buffer: bytearray, attempts: list[_Read | CheckpointError]
    ) -> Filled:
        """Join what was read to its chunks, in order."""
        view = memoryview(buffer)[: band.nbytes]
        reads: list[_Read] = []
        faults: list[CheckpointError] = []
        for piece, read in zip(band.pieces, attempts, strict=True):
            if isinstance(read, _Read):
                try:
                    self._account(_place(entry, piece.chunk), piece, read)
                    reads.append(read)
                    continue
                except CheckpointError as error:
                    read = error
            faults.append(read)
        crc32 = 0 if faults else self._joined(band, view, reads)
        return Filled(entry, band, view, crc32, tuple(faults))

    @staticmethod
    def _joined(band: Band, view: memoryview, reads: list[_Read]) -> int:
        """CRC of a band: from its pieces' where they follow one another, or else taken anew."""
        if not band.straight:
            return isal_zlib.crc32(view)
        crc32 = 0
        for piece, read in zip(band.pieces, reads, strict=True):
            crc32 = isal_zlib.crc32_combine(crc32, read.crc32, piece.nbytes)
        return crc32

    def _account(self, place: _Place, piece: Piece, read: _Read) -> None:
        """Join a piece to its chunk; at the chunk's end hold the whole CRC against the record's."""
        located = self._located[place]
        self.bytes_read += piece.nbytes + len(read.tail)
        progress = self._progress.setdefault(place, _Progress())
        progress.crc32 = isal_zlib.crc32_combine(progress.crc32, read.crc32, piece.nbytes)
        progress.done += piece.nbytes
        if piece.end == located.nbytes:
            del self._progress[place], self._located[place]
            self._decoded.pop(place, None)
            # A chunk whose earlier pieces failed has been reported already.
            if not located.direct or progress.done < located.nbytes:
                return
            if located.checkable:
                located.verify(read.tail, progress.crc32)
            else:
                self.unchecked[located.name] += 1

    def _fill(self, entry: TensorEntry, band: Band, buffer: bytearray) -> list[_Read | CheckpointError]:
        view = memoryview(buffer)[: band.nbytes]
        reads: list[_Read | CheckpointError] = []
        if band.straight:
            at = 0
            for piece in band.pieces:
                reads.append(self._attempt(entry, piece, view[at : at + piece.nbytes]))
                at += piece.nbytes
            return reads
        import numpy as np

        item = ITEMSIZE[entry.dtype]
        target = np.frombuffer(view, dtype=f"V{item}").reshape(band.box.sizes)
        for piece in band.pieces:
            source = self._scratch_view(piece.nbytes)
            reads.append(self._attempt(entry, piece, source))
            region = piece.box.shifted(band.box.offsets)
            slices = tuple(slice(o, e) for o, e in zip(region.offsets, region.ends, strict=True))
            target[slices] = np.frombuffer(source, dtype=f"V{item}").reshape(piece.box.sizes)
        return reads

    def _attempt(self, entry: TensorEntry, piece: Piece, view: memoryview) -> _Read | CheckpointError:
        """A damaged chunk is a value, so that the others of its band are looked at too."""
        try:
            return self._read(entry, piece, view)
        except CheckpointError as error:
            return error

    def _scratch_view(self, size: int) -> memoryview:
        buffer: bytearray | None = getattr(self._scratch, "buffer", None)
        if buffer is None:
            buffer = self._scratch.buffer = bytearray(self.band_bytes)
        return memoryview(buffer)[:size]

    def _read(self, entry: TensorEntry, piece: Piece, view: memoryview) -> _Read:
        located = self._locate(entry, piece.chunk)
        if not located.direct:
            view[:] = self._decode(entry, piece.chunk)[piece.start : piece.end]
            return _Read(isal_zlib.crc32(view), b"")
        tail = bytearray()
        if located.checkable and piece.end == located.nbytes:
            tail = bytearray(located.guarded.length - located.nbytes)
        start = located.start + piece.start
        self.records.store.read_into(located.name, start, [view, memoryview(tail)] if tail else [view])
        return _Read(isal_zlib.crc32(view), bytes(tail))

    def _locate(self, entry: TensorEntry, chunk: Chunk) -> Located:
        place = _place(entry, chunk)
        found = self._located.get(place)
        if found is None:
            found = self.records.locate(entry, chunk)
            self._located[place] = found
        return found

    def _decode(self, entry: TensorEntry, chunk: Chunk) -> bytes:
        """The whole of a chunk that does not stand plainly, kept until its last piece is taken."""
        place = _place(entry, chunk)
        with self._lock:
            if place not in self._decoded:
                self._decoded[place] = self.records.read_chunk(entry, chunk)
            return self._decoded[place]


_Job = tuple[TensorEntry, Band, bytearray, "Future[list[_Read | CheckpointError]]"]
"""A band being filled."""


def _place(entry: TensorEntry, chunk: Chunk) -> _Place:
    return entry.key, chunk.box.offsets
