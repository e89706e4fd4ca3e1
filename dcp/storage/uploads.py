"""An object streamed into a bucket: small ones in one request, large ones in parts that go up side by side.

`uploading` is the sink that cuts; an `Upload` is what a store makes of the pieces. Memory is bounded by
`BUFFERS` of `PART` bytes an upload, whatever the object's size. Names of what is not finished say which
process writes it, so that somebody else can tell whether it still lives: see `is_abandoned`.
"""

from __future__ import annotations

import re
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from dcp.errors import DamagedUploadError, StorageError
from dcp.processes import Process
from dcp.storage.partial import FOREIGN_SECONDS, TEMPORARY
from dcp.storage.store import Sink

PART = 16 << 20
"""Bytes of one part. Large objects have larger ones further on: stores limit their number."""
WHOLE = 4
"""Parts up to which an object goes up in one request."""
THREADS = 4
"""Parts of one object on their way at a time."""
BUFFERS = max(WHOLE, THREADS) + 1
"""Parts of one object in memory at a time."""

UPLOAD_MEMORY = BUFFERS * PART
"""Bytes that one upload holds, up to an object of 40 GB."""

_GROWTH = 2500
"""Parts after which they double in size. So 10,000 of them, the most that S3 takes, hold 600 GiB."""
_MARK = re.compile(
    re.escape(TEMPORARY) + r"(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-(?P<started>-?\d+)-(?P<id>[0-9a-f]{8})"
)

Pieces = Sequence[memoryview]
"""Bytes in several places, one behind another."""


_live: set[str] = set()
"""Marks of what this process has under way."""


class Upload(ABC):
    """One object on its way: either `whole`, or `part` any number of times and then `complete`.

    What it stores before it is complete has `mark` at the end of its name, or in it.

    Every verb is repeated within bounds where that may help, and compares what the store says that it has
    with what was sent. Nothing shows under the object's name before `whole` or `complete` returns.
    """

    def __init__(self) -> None:
        self.mark = mark()

    @abstractmethod
    def whole(self, pieces: Pieces) -> None:
        """Send all of it in one request."""

    @abstractmethod
    def part(self, number: int, data: memoryview) -> None:
        """Send a part, counted from 0. Called from several threads."""

    @abstractmethod
    def complete(self) -> None:
        """Make the parts one object."""

    @abstractmethod
    def abort(self) -> None:
        """Remove all parts, also those of which it is not known whether they arrived. It may fail."""


@contextmanager
def uploading(upload: Upload) -> Iterator[Sink]:
    """A sink for one object, which appears when the block ends, and not at all if it raises."""
    with _living(upload.mark), ThreadPoolExecutor(THREADS, thread_name_prefix="upload") as pool:
        sink = _PartedSink(upload, pool)
        try:
            yield sink
            sink.finish()
        except BaseException:
            sink.discard()
            raise


@contextmanager
def living_mark() -> Iterator[str]:
    """A `mark` that says of what bears it that it is not abandoned, until the block ends."""
    made = mark()
    with _living(made):
        yield made


@contextmanager
def _living(made: str) -> Iterator[None]:
    _live.add(made)
    try:
        yield
    finally:
        _live.discard(made)


class _PartedSink:
    """Copies what it takes into parts. They are held back until it is known that there will be several."""

    def __init__(self, upload: Upload, pool: ThreadPoolExecutor) -> None:
        self._upload = upload
        self._pool = pool
        self._buffer = bytearray()
        self._filled = 0
        self._held: list[bytearray] = []
        self._number = 0
        self._running: deque[tuple[Future[None], bytearray]] = deque()
        self._free: list[bytearray] = []

    def write(self, data: bytes | bytearray | memoryview, /) -> int:
        view = memoryview(data).cast("B")
        total = len(view)
        while view:
            if self._filled == len(self._buffer):
                self._next_buffer()
            count = min(len(view), len(self._buffer) - self._filled)
            self._buffer[self._filled : self._filled + count] = view[:count]
            self._filled += count
            view = view[count:]
        return total

    def _next_buffer(self) -> None:
        if self._filled:
            self._held.append(self._buffer)
        if self._number or len(self._held) > WHOLE:
            self._send_held()
        size = PART << ((self._number + len(self._held)) // _GROWTH)
        while self._running and len(self._running) + len(self._held) >= BUFFERS:
            self._settle()
        self._buffer = self._free.pop() if self._free else bytearray()
        if len(self._buffer) != size:
            self._buffer = bytearray(size)
        self._filled = 0

    def _send_held(self) -> None:
        for buffer in self._held:
            self._submit(buffer, len(buffer))
        self._held.clear()

    def _submit(self, buffer: bytearray, size: int) -> None:
        data = memoryview(buffer)[:size]
        self._running.append((self._pool.submit(self._upload.part, self._number, data), buffer))
        self._number += 1

    def _settle(self) -> None:
        future, buffer = self._running.popleft()
        future.result()
        self._free.append(buffer)

    def finish(self) -> None:
        if not self._number and len(self._held) + bool(self._filled) <= WHOLE:
            tail = memoryview(self._buffer)[: self._filled]
            self._upload.whole([*(memoryview(buffer) for buffer in self._held), tail])
            return
        self._send_held()
        if self._filled:
            self._submit(self._buffer, self._filled)
        while self._running:
            self._settle()
        self._upload.complete()

    def discard(self) -> None:
        for future, _ in self._running:
            future.cancel()
        for future, _ in self._running:
            if not future.cancelled():
                future.exception()
        if self._number:
            try:
                self._upload.abort()
            except StorageError:
                # The first error is the one to report; what is left is swept by the next writer.
                return


def require_same(url: str, kind: str, sent: object, stored: object) -> None:
    """Compare what a store says of an object with what was sent.

    Raises:
        DamagedUploadError: they differ.
    """
    if sent != stored:
        raise DamagedUploadError(
            f"{url} was damaged on its way: {kind} {sent} was sent, {stored} is stored; try again", url
        )


def mark() -> str:
    """The end of a name for what this process writes and has not finished; another one each time."""
    process = Process.current()
    return f"{TEMPORARY}{process.machine}-{process.pid}-{process.started}-{uuid.uuid4().hex[:8]}"


def is_partial(name: str) -> bool:
    """Whether an object's name is one of something unfinished."""
    return TEMPORARY in name.rpartition("/")[2]


def is_bare(name: str) -> bool:
    """Whether a hidden object is of no upload: its name is a `mark` and nothing else."""
    return _MARK.fullmatch(name) is not None


def is_abandoned(
    name: str, modified: float | None, *, now: float | None = None, seconds: float = FOREIGN_SECONDS
) -> bool:
    """Whether who writes something unfinished is dead.

    On this machine the system knows. Another machine's must have rested for ``seconds``, by default a day.

    Args:
        name: of the object.
        modified: when it was last written, in seconds since the epoch.
        now: what the store's clock shows, if that is known.
        seconds: how long it must have rested.
    """
    found = _MARK.search(name.rpartition("/")[2])
    if found is None:
        return False
    if found[0] in _live:
        return False
    writer = Process(found["machine"], int(found["pid"]), int(found["started"]))
    if writer.observable:
        return writer.ended_here or writer == Process.current()
    return modified is not None and (time.time() if now is None else now) - modified > seconds
