"""`BucketReader`: a storage reader for ``torch.distributed.checkpoint.load`` on any store.

It takes the place of torch's `FileSystemReader` and reads less: of each chunk only the rows that the rank
needs, near ranges joined, several at a time. It also reads what torch's cannot (rank-local saves,
safetensors files) and refuses what torch's would run: `.metadata` is parsed rather than unpickled, and the
objects' pickles are all scanned before the planner sees one of them.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp.archive import Archive
from dcp.boxes import Box
from dcp.checkpoint import Checkpoint, open_checkpoint
from dcp.checks.subclasses import damage_of
from dcp.dtypes import ITEMSIZE
from dcp.errors import CheckpointError, CkptError, UsageError
from dcp.index import ObjectEntry, TensorEntry
from dcp.load.bits import Bits, bits_of, part
from dcp.load.foreign import load_foreign
from dcp.load.metadata import chunk_number, torch_metadata
from dcp.load.needs import ChunkNeed, Need, ObjectNeed
from dcp.load.objects import Refused, refusal, refused
from dcp.load.preflight import require_whole
from dcp.load.pull import Pull
from dcp.load.regions import spans
from dcp.load.requests import GAP, GROUP, REQUEST
from dcp.pickles.scan import Allowance
from dcp.records import Records
from dcp.storage import normalise_url, open_store, require_options, require_protocol

_Work = tuple[ReadItem, Need]


class BucketReader(StorageReader):
    """Reads a checkpoint from a local path or an fsspec URL (``gs://``, ``s3://``, ``memory://``).

    Attributes:
        bytes_read: bytes read from storage by the last load, its index left out.
        requests: ranges read by the last load.
    """

    def __init__(
        self,
        url: str | PathLike[str],
        *,
        threads: int = 4,
        memory_budget: int = 128 << 20,
        allow: Sequence[str] = (),
        trust_objects: bool = False,
        copied: bool = False,
        allow_torn: bool = False,
        **options: Any,
    ) -> None:
        """
        Args:
            url: the checkpoint.
            threads: requests in flight.
            memory_budget: bytes that may be read ahead beside the tensors themselves; also the most that
                a compressed or strided chunk may take once decoded. Objects are held as they are stored
                until all of them are judged.
            allow: classes of your own that objects may ask for (``pkg.mod.Class``, ``pkg.*``) beside plain
                values, tensors and arrays. Their code runs when they are unpickled.
            trust_objects: unpickle all objects, even where that runs arbitrary code.
            copied: this is a copy, so that data files may be newer than the index.
            allow_torn: begin to load although files are missing, cut off, or were overwritten since.
            options: passed to the fsspec filesystem.

        Raises:
            UsageError: an argument is not possible.
        """
        super().__init__()
        self.url = normalise_url(url)
        require_protocol(self.url)
        require_options(self.url, options, BucketReader)
        if threads < 1:
            raise UsageError(f"threads is {threads}; at least one request must be in flight")
        if memory_budget < 1:
            raise UsageError(
                f"memory_budget is {memory_budget} bytes; give a positive number, such as 128 << 20"
            )
        self._allow = Allowance(allow)
        self._threads = threads
        self._budget = memory_budget
        self._trust = trust_objects
        self._copied = copied
        self._allow_torn = allow_torn
        self._options = options
        self._checkpoint: Checkpoint | None = None
        self._failure: CkptError | None = None
        self.bytes_read = 0
        self.requests = 0

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's URL, as torch's loggers ask for it."""
        return self.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether there is a filesystem for it; nothing is read."""
        try:
            open_store(checkpoint_id)
        except UsageError:
            return False
        return True

    def reset(self, checkpoint_id: Any = None) -> None:
        """Forget the last load; go to another checkpoint if one is given."""
        if checkpoint_id:
            self.url = normalise_url(checkpoint_id)
        self._checkpoint = None
        self._failure = None

    # Without an argument called `kwargs` torch does not ask for rank-local metadata, which is merged here.
    def read_metadata(self, *args: Any, **ignored: Any) -> Metadata:
        """The checkpoint's index in torch's terms.

        What keeps it from being read is raised by `set_up_storage_reader`, and by whatever looks into the
        answer before: torch would make an ``AssertionError`` of it here.

        Raises:
            MetadataError, NotLoadableError, StorageError: as `open_checkpoint`.
            NotLoadableError: the checkpoint is torn, as far as its index and a listing show.
        """
        # Every load begins here: what an earlier one knew may have been overwritten since.
        self._checkpoint = self._failure = None
        try:
            checkpoint = self._open()
            if not self._allow_torn:
                require_whole(checkpoint, copied=self._copied)
            return torch_metadata(checkpoint.index)
        except CkptError as error:
            self._failure = error
            return _Unread(error)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Open the checkpoint.

        Raises:
            CkptError: what `read_metadata` met.
        """
        if self._failure is not None:
            raise self._failure
        self._open()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read everything that the plan asks for into the planner's tensors.

        Raises:
            CheckpointError: a record is missing or damaged.
            RecordError: ``records.unsafe``; objects ask for more than is allowed. All of them are named,
                before any object or tensor is given to the planner.
            StorageError: storage failed.
        """
        checkpoint = self._open()
        pull = Pull(checkpoint, threads=self._threads, budget=self._budget)
        work = [pair for item in plan.items for pair in self._needs(checkpoint, item)]
        work.sort(key=_position)
        pull.locate(need for _, need in work)
        left = Counter(id(item) for item, _ in work)
        records = Records(pull.source, checkpoint.objects)
        foreign: set[int] = set()
        targets: dict[int, torch.Tensor] = {}
        groups = list(_grouped(work))
        answers = pull.groups([need for _, need in group] for group in groups)
        objects = _Objects(planner, None if self._trust else self._allow)
        for group in groups:
            _, got = next(answers)
            for (item, need), value in zip(group, got, strict=True):
                if id(item) in foreign:
                    continue
                if isinstance(value, CheckpointError):
                    if isinstance(need, ObjectNeed):
                        raise value
                    objects.give()
                    if not load_foreign(records, planner, item, need.entry, need.chunk):
                        raise damage_of(records, need.entry.key, need.chunk.record) or value
                    foreign.add(id(item))
                    continue
                if isinstance(need, ObjectNeed):
                    assert isinstance(value, Archive)
                    objects.take(item, need.entry, value)
                    continue
                objects.give()
                assert isinstance(value, np.ndarray)
                if id(item) not in targets:
                    targets[id(item)] = target_of(planner, item)
                piece = need.span.box.shifted(tuple(item.storage_offsets))
                put(targets[id(item)], piece, value, need.entry)
                left[id(item)] -= 1
                if not left[id(item)]:
                    planner.commit_tensor(item, targets.pop(id(item)))
            del got
        objects.give()
        self.bytes_read, self.requests = pull.source.bytes_read, pull.source.requests
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _open(self) -> Checkpoint:
        if self._checkpoint is None:
            self._checkpoint = open_checkpoint(self.url, **self._options)
        return self._checkpoint

    def _needs(self, checkpoint: Checkpoint, item: ReadItem) -> Iterator[_Work]:
        entry = checkpoint.index.entries[item.storage_index.fqn]
        if isinstance(entry, ObjectEntry):
            yield item, ObjectNeed(entry)
            return
        chunk = entry.chunks[chunk_number(entry, item.storage_index)]
        region = Box(tuple(item.storage_offsets), tuple(item.lengths))
        for span in spans(region, chunk.box.sizes, ITEMSIZE[entry.dtype], gap=GAP, limit=REQUEST):
            yield item, ChunkNeed(entry, chunk, span)


class _Unread(Metadata):
    """In the place of an index that could not be read: to look into it raises why."""

    def __init__(self, error: CkptError) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise self._error


class _Objects:
    """The objects of a load, kept until all of them are judged. They come before all tensors."""

    def __init__(self, planner: LoadPlanner, allow: Allowance | None) -> None:
        """
        Args:
            allow: what they may ask for beyond the built-in lists; None if they may ask for anything.
        """
        self._planner = planner
        self._allow = allow
        self._held: list[tuple[ReadItem, bytes]] = []
        self._refused: list[Refused] = []

    def take(self, item: ReadItem, entry: ObjectEntry, archive: Archive) -> None:
        found = None if self._allow is None else refused(entry, archive, self._allow)
        if found is None:
            self._held.append((item, archive.data))
        else:
            self._refused.append(found)

    def give(self) -> None:
        """Hand all of them to the planner.

        Raises:
            RecordError: ``records.unsafe``; some must not be unpickled.
        """
        if self._refused:
            raise refusal(self._refused)
        self._held.reverse()
        while self._held:
            item, data = self._held.pop()
            self._planner.load_bytes(item, io.BytesIO(data))


def target_of(planner: LoadPlanner, item: ReadItem) -> torch.Tensor:
    """The planner's tensor for an item.

    Raises:
        CheckpointError: ``keys.shape``; its shape is not what the item asks for.
        UsageError: several of its elements are one.
    """
    target = planner.resolve_tensor(item).detach()
    if target.size() != item.lengths:
        raise CheckpointError(
            f"{item.dest_index.fqn}: the planner gave a tensor of shape {list(target.size())} for a region "
            f"of {list(item.lengths)}",
            code="keys.shape",
            key=item.dest_index.fqn,
            expected=list(item.lengths),
            actual=list(target.size()),
        )
    if any(step == 0 and size > 1 for step, size in zip(target.stride(), target.size(), strict=True)):
        raise UsageError(
            f"{item.dest_index.fqn}: elements of the tensor to load into share memory, as expand() makes "
            "them; load into its contiguous()"
        )
    return target


def put(target: torch.Tensor, box: Box, bits: Bits, entry: TensorEntry) -> None:
    """Copy elements of ``entry``'s dtype into the region ``box`` of a tensor of any dtype or device."""
    dtype = getattr(torch, entry.dtype)
    plain = target.device.type == "cpu" and target.dtype == dtype
    if plain and not target.is_conj() and not target.is_neg() and type(target) is torch.Tensor:
        np.copyto(part(bits_of(target), box), bits)
        return
    source = torch.empty(box.sizes, dtype=dtype)
    np.copyto(bits_of(source), bits)
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        target = target.narrow(dim, offset, size)
    target.copy_(source)


def _position(work: _Work) -> tuple[bool, str, int, int]:
    """Objects first, then as things stand in storage."""
    _, need = work
    chunk = isinstance(need, ChunkNeed)
    if need.record is None:
        return chunk, "", 0, 0
    return chunk, need.record.path, need.record.offset, need.span.start if isinstance(need, ChunkNeed) else 0


def _grouped(work: Sequence[_Work]) -> Iterator[list[_Work]]:
    """Consecutive needs, together about `GROUP` bytes."""
    group: list[_Work] = []
    size = 0
    for item, need in work:
        if group and size + need.cost > GROUP:
            yield group
            group, size = [], 0
        group.append((item, need))
        size += need.cost
    if group:
        yield group
