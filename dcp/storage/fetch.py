"""Reading many byte ranges: in parallel, bounded in memory, handed out in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from dcp.storage.ranges import ByteRange
from dcp.storage.store import Store

T = TypeVar("T")


@contextmanager
def reader_threads(threads: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """Threads for a generator that reads ahead; what is queued is dropped where it ends before its time."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    wait = True
    try:
        yield pool
    except GeneratorExit:
        # Whoever took what was read failed, and what clears up after it may be one of these very threads.
        wait = False
        raise
    finally:
        pool.shutdown(wait=wait, cancel_futures=True)


def fetch(
    store: Store, ranges: Iterable[ByteRange], *, threads: int = 4, budget: int = 64 << 20
) -> Iterator[tuple[ByteRange, bytes]]:
    """Yield every range with its bytes, in the order given, reading ahead in ``threads`` threads.

    Args:
        store: where the objects are.
        ranges: half-open byte ranges; consumed lazily.
        threads: reads in flight.
        budget: bytes that may be in flight or waiting; one range larger than it is read alone.

    Raises:
        StorageError, CheckpointError: as `Store.read_range`; reads still queued are dropped.
    """
    return fetch_by(
        lambda item: store.read_range(item.name, item.start, item.end), ranges, threads=threads, budget=budget
    )


def fetch_by(
    read: Callable[[ByteRange], T], ranges: Iterable[ByteRange], *, threads: int, budget: int
) -> Iterator[tuple[ByteRange, T]]:
    """As `fetch`, by whatever reads one range; it is called in several threads at a time."""
    waiting: deque[tuple[ByteRange, Future[T]]] = deque()
    held = 0
    with reader_threads(threads, "fetch") as pool:
        for item in ranges:
            while waiting and (held + item.length > budget or len(waiting) >= 4 * threads):
                first, future = waiting.popleft()
                data = future.result()
                held -= first.length
                yield first, data
                del data
            held += item.length
            waiting.append((item, pool.submit(read, item)))
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
