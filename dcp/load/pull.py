"""Getting pieces of chunks and whole objects out of storage, many at a time, each byte once.

A `Need` is one piece of a chunk, or one object. `Pull.groups` takes needs in groups and yields each group
with what was got, in order, reading ahead into later groups while the caller works on one. Within a
group ranges are sorted by file, joined where they are near and read in parallel.

Two ways lead to a chunk's bytes. A small record that is needed whole is read whole and decoded in memory,
so that its head costs no request of its own. For others the head is read first; then a piece is one exact
byte range. Either way CRCs are checked where a chunk is read from its first byte to its last, in order. A
record that is not plain (compressed, strided) is decoded whole when its turn comes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from dcp.archive import Archive
from dcp.checkpoint import Checkpoint
from dcp.dtypes import ITEMSIZE
from dcp.errors import CheckpointError, NotFoundError
from dcp.index import Chunk
from dcp.load.bits import Bits, bits_in
from dcp.load.buffers import Buffers
from dcp.load.checksums import Checksums, Summing, part_of
from dcp.load.needs import ChunkNeed, Need, ObjectNeed
from dcp.load.requests import GAP, REQUEST, SMALL, TINY
from dcp.load.source import Metered, Remembering
from dcp.record import Record
from dcp.records import Located, Records, fault
from dcp.storage import ByteRange, coalesce, fetch_by

T = TypeVar("T")
_Place = tuple[str, Chunk]


Got = Bits | Archive | CheckpointError
"""The bits of the need's ``span.box``, or the object's archive, or why neither can be had."""


@dataclass(slots=True)
class _Group:
    needs: Sequence[Need]
    requests: list[ByteRange]
    blocks: list[tuple[ByteRange, memoryview]] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return len(self.blocks) == len(self.requests)


class Pull:
    """Reads one checkpoint.

    Attributes:
        source: counts bytes and requests of everything read.
    """

    def __init__(self, checkpoint: Checkpoint, *, threads: int = 4, budget: int = 64 << 20) -> None:
        """
        Args:
            threads: requests in flight.
            budget: bytes that may be in flight or read ahead, and the most one record may take decoded.
        """
        self.source = Metered(checkpoint.store)
        # A request may be longer by what guards a chunk's end.
        self._buffers = Buffers(REQUEST + GAP)
        self._summing = Summing(self.source, self._buffers)
        self._memory = Remembering(self.source)
        self._near = Records(self._memory, checkpoint.objects)
        self._far = Records(self.source, checkpoint.objects)
        self._objects = checkpoint.objects
        self._threads = threads
        self._budget = budget
        self._located: dict[_Place, Located | CheckpointError] = {}
        self._checksums = Checksums()
        self._decoded: OrderedDict[_Place, bytes] = OrderedDict()
        places = Counter((record.path, record.offset) for _, record in checkpoint.index.records())
        self._unplaced = {path for (path, _), count in places.items() if count > 1}
        """Files in which the index's offsets do not locate records: whole safetensors files."""

    def groups(self, groups: Iterable[Sequence[Need]]) -> Iterator[tuple[Sequence[Need], list[Got]]]:
        """Read groups of needs, each yielded with what was got for each of its needs.

        Args:
            groups: consumed lazily, somewhat ahead of what is yielded. What is yielded is valid until
                the next is taken: its memory is used again.

        Raises:
            StorageError: storage failed in a way that says nothing of the checkpoint.
        """
        planned: deque[_Group] = deque()

        def requests() -> Iterator[ByteRange]:
            for needs in groups:
                group = self._plan(needs)
                planned.append(group)
                yield from group.requests

        for item, data in fetch_by(
            self._summing.read, requests(), threads=self._threads, budget=self._budget
        ):
            while planned[0].complete:
                yield from self._hand_out(planned.popleft())
            planned[0].blocks.append((item, data))
            del data
        while planned:
            yield from self._hand_out(planned.popleft())

    def _hand_out(self, group: _Group) -> Iterator[tuple[Sequence[Need], list[Got]]]:
        yield self._finish(group)
        for _, data in group.blocks:
            self._buffers.give_back(data)

    def forget(self) -> None:
        """Drop what is known of chunks read so far; to be called between `groups`."""
        self._located.clear()
        self._checksums = Checksums()
        self._decoded.clear()

    def locate(self, needs: Iterable[Need]) -> None:
        """Read the heads of records in parallel where `groups` would otherwise stop for each of them."""
        chunks = (need for need in needs if isinstance(need, ChunkNeed) and not self._is_read_whole(need))
        # Several pieces of one chunk would otherwise all read its head, each in a thread of its own.
        wanted = {need.place: need for need in chunks}.values()
        with ThreadPoolExecutor(self._threads, thread_name_prefix="locate") as pool:
            for _ in pool.map(self._locate, wanted):
                pass

    def _is_read_whole(self, need: Need) -> bool:
        record = need.record
        if record is None or isinstance(need, ObjectNeed):
            return True
        if record.path in self._unplaced:
            return False
        return record.length <= (SMALL if need.span.box.volume == need.chunk.box.volume else TINY)

    def _locate(self, need: ChunkNeed) -> Located | CheckpointError:
        found = self._located.get(need.place)
        if found is None:
            found = self._located[need.place] = _attempt(lambda: self._far.locate(need.entry, need.chunk))
        return found

    def _plan(self, needs: Sequence[Need]) -> _Group:
        ranges: set[ByteRange] = set()
        sums: list[ByteRange] = []
        for need in needs:
            record = need.record
            if record is None or not self._exists(record):
                continue
            if isinstance(need, ObjectNeed) or self._is_read_whole(need):
                ranges.add(ByteRange(record.path, record.offset, record.end))
                continue
            located = self._locate(need)
            if isinstance(located, CheckpointError) or not located.direct:
                continue
            ranges.add(_range(need, located))
            wanted = self._checksums.announce(need, located)
            if wanted is not None:
                sums.append(wanted)
        requests = coalesce(ranges, gap=GAP, limit=REQUEST)
        self._summing.announce(requests, sums)
        return _Group(needs, requests)

    def _exists(self, record: Record) -> bool:
        info = self._objects.get(record.path)
        return info is not None and 0 <= record.offset < record.end <= info.size

    def _finish(self, group: _Group) -> tuple[Sequence[Need], list[Got]]:
        self._memory.hold(block for block in group.blocks if block[1])
        try:
            return group.needs, [self._try(need) for need in group.needs]
        finally:
            self._memory.hold(())

    def _try(self, need: Need) -> Got:
        return _attempt(lambda: self._meet(need))

    def _meet(self, need: Need) -> Bits | Archive:
        if isinstance(need, ObjectNeed):
            return self._near.read_object(need.entry)
        if self._is_read_whole(need):
            self._require_memory(need)
            return _bits(need, self._near.read_chunk(need.entry, need.chunk), need.span.start)
        located = self._locate(need)
        if isinstance(located, CheckpointError):
            raise located
        if not located.direct:
            return _bits(need, self._decode(need), need.span.start)
        item = _range(need, located)
        data = self._memory.view(item.name, item.start, item.end)
        if self._checksums.continues(need, located):
            content, tail = data[: need.cost], data[need.cost :]
            crc32 = self._summing.take(part_of(need, located), content)
            self._checksums.advance(need, located, crc32, tail)
        return _bits(need, data, 0)

    def _decode(self, need: ChunkNeed) -> bytes:
        """A whole chunk, decoded; the last ones are kept as far as the budget goes."""
        data = self._decoded.pop(need.place, None)
        if data is None:
            self._require_memory(need)
            data = self._near.read_chunk(need.entry, need.chunk)
        self._decoded[need.place] = data
        while len(self._decoded) > 1 and sum(map(len, self._decoded.values())) > self._budget:
            self._decoded.popitem(last=False)
        return data

    def _require_memory(self, need: ChunkNeed) -> None:
        size = need.chunk.box.volume * ITEMSIZE[need.entry.dtype]
        if need.record is not None and size > max(self._budget, need.record.length):
            raise fault(
                need.entry,
                need.record,
                f"decoding it takes {size} bytes at once, but only {self._budget} are allowed; "
                "give a larger memory budget",
                chunk=need.chunk,
                code="records.unchecked",
            )


def _range(need: ChunkNeed, located: Located) -> ByteRange:
    """What is read for a need of a direct chunk: its bytes, and at the chunk's end what guards them."""
    part = part_of(need, located)
    if need.span.end == located.nbytes and located.checkable:
        return ByteRange(part.name, part.start, located.guarded.end)
    return part


def _bits(need: ChunkNeed, data: bytes | memoryview, start: int) -> Bits:
    """The piece as an array over ``data``, in which its first byte is at ``start``."""
    return bits_in(data, start, need.span.box, need.chunk.box.sizes, ITEMSIZE[need.entry.dtype])


def _attempt(action: Callable[[], T]) -> T | CheckpointError:
    """The action's value, or the failure that the checkpoint is to blame for."""
    try:
        return action()
    except CheckpointError as error:
        return error.with_traceback(None)
    except NotFoundError as error:
        return CheckpointError(f"{error}: it was there when the load began", code="files.missing")
