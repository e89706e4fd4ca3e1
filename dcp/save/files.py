"""Data files of a save: which items stand in which file, and one file written as torch writes it.

A file is records one after another, each what `torch.save` makes of one value, objects before tensors, as
torch's own `FileSystemWriter` lays them out. `split` deals a rank's items out over files that are written
in parallel; `write_file` writes one and says where each record stands.
"""

from __future__ import annotations

import heapq
import io
import math
import pickle
from collections.abc import Callable, Sequence
from typing import IO, TypeVar, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._utils import _element_size
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from dcp.errors import CheckpointError, CkptError, UsageError
from dcp.storage import Sink, Store

T = TypeVar("T")

LEAST = 32 << 20
"""Bytes of tensors for which another file is worth its requests: such a file still goes up in one."""
_LOOSE = 1 << 16
_GATHERED = 1 << 20


class Stream:
    """What `torch.save` writes to: counts bytes, and gathers small pieces into large ones."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._small = bytearray()
        self.position = 0
        """Bytes taken so far."""

    def write(self, data: bytes | bytearray | memoryview, /) -> int:
        size = len(data)
        if size < _LOOSE:
            self._small += data
            if len(self._small) >= _GATHERED:
                self.drain()
        else:
            self.drain()
            self._sink.write(data)
        self.position += size
        return size

    def flush(self) -> None:
        """Nothing: torch flushes after every record, and a record can be small."""

    def drain(self) -> None:
        """Hand on what was gathered."""
        if self._small:
            self._sink.write(bytes(self._small))
            self._small.clear()


def size_of(item: WriteItem) -> int:
    """Bytes of a tensor item's elements; 0 for an object, whose size nobody knows before it is pickled."""
    if item.tensor_data is None:
        return 0
    # A shard's item carries the size of the whole tensor beside the chunk it is about.
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def split(items: Sequence[WriteItem], files: int) -> list[list[WriteItem]]:
    """Deal a plan's items out, see `deal`."""
    return deal(items, files, lambda item: None if item.type == WriteItemType.BYTE_IO else size_of(item))


def deal(items: Sequence[T], files: int, size: Callable[[T], int | None]) -> list[list[T]]:
    """Deal items out over at most ``files`` files of about the same size; none is empty.

    One file keeps the items' order, objects first. For fewer than `LEAST` bytes a file, there are fewer.

    Args:
        size: bytes of an item's elements; None for an object.
    """
    objects = [item for item in items if size(item) is None]
    tensors = [(item, nbytes) for item in items if (nbytes := size(item)) is not None]
    files = max(1, min(files, sum(nbytes for _, nbytes in tensors) // LEAST))
    if files == 1:
        return [objects + [item for item, _ in tensors]] if items else []
    dealt: list[list[T]] = [[] for _ in range(files)]
    for number, item in enumerate(objects):
        dealt[number % files].append(item)
    filled = [(0, number) for number in range(files)]
    for item, nbytes in sorted(tensors, key=lambda pair: pair[1], reverse=True):
        taken, number = filled[0]
        dealt[number].append(item)
        heapq.heapreplace(filled, (taken + nbytes, number))
    return [part for part in dealt if part]


def write_file(
    store: Store, name: str, items: Sequence[WriteItem], planner: SavePlanner, stopped: Callable[[], bool]
) -> list[WriteResult]:
    """Write one file, which appears under its name when it is whole; where each item's record stands in it.

    Args:
        stopped: asked before every item; once it says yes the file is given up.

    Raises:
        StorageError: storage failed.
        UsageError: an object cannot be pickled, or a tensor has no record, see `require_plain`.
        CheckpointError: a tensor has not the shape that the index will give it.
        InterruptedError: the file was given up.
    """
    results = []
    with store.writer(name) as sink:
        stream = Stream(sink)
        for item in items:
            if stopped():
                raise InterruptedError(f"{name} was given up because another file failed")
            start = stream.position
            if item.type == WriteItemType.BYTE_IO:
                stream.write(pickled(planner, item).getbuffer())
            else:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor)
                torch.save(_plain(_true(tensor, item)), cast(IO[bytes], stream))
            length = stream.position - start
            results.append(
                WriteResult(
                    index=item.index, size_in_bytes=length, storage_data=_StorageInfo(name, start, length)
                )
            )
        stream.drain()
    return results


def pickled(planner: SavePlanner, item: WriteItem) -> io.BytesIO:
    """An object as the planner has it written.

    Raises:
        UsageError: it cannot be pickled; names its key.
    """
    try:
        record = planner.resolve_data(item)
    except (CkptError, MemoryError):
        raise
    # Pickling runs methods of the object's class, which can raise anything.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip(": ").splitlines()[0][:300]
        raise UsageError(
            f"{item.index.fqn} cannot be pickled ({reason}): leave it out of the state, or put into it what "
            "it is made of, such as its state_dict()"
        ) from error
    assert isinstance(record, io.BytesIO)
    return record


def require_plain(key: str, value: object, where: str = "") -> None:
    """No tensor that torch has no record for: see `_unsavable`.

    Raises:
        UsageError: it is one.
    """
    why = _unsavable(value) if isinstance(value, torch.Tensor) else None
    if why is not None:
        raise UsageError(f"{key}{where} {why}")


def _unsavable(value: torch.Tensor) -> str | None:
    """Why a tensor cannot be saved and what to do instead; None if it can."""
    if is_lazy(value):
        return (
            "has no shape and no values yet: call the module once, so that it is initialised, and then save"
        )
    if value.is_nested:
        return (
            "is a nested tensor, which a checkpoint has no place for: save what it is made of, such as the "
            "tensors that its unbind() gives"
        )
    if isinstance(value, DTensor) and any(place.is_partial() for place in value.placements):
        return (
            "is a DTensor with a Partial placement, of which every rank holds a part of a sum and none the "
            "values: redistribute it to Replicate or Shard before the save, or leave it out of the state"
        )
    try:
        _element_size(value.dtype)  # type: ignore[no-untyped-call]
    except TypeError:
        kind = str(value.dtype).removeprefix("torch.")
        same = "int16" if value.dtype.itemsize == 2 else "uint8"
        return (
            f"is of type {kind}, which torch.distributed.checkpoint cannot save: save its "
            f"view(torch.{same}), and load into such a view"
        )
    if value.is_meta or isinstance(value, FakeTensor):
        what = "on the meta device" if value.is_meta else "a FakeTensor"
        return (
            f"is {what} and has no values to save: save after the model was made real (to_empty and "
            "initialised, or loaded), or leave the key out of the state"
        )
    if value.layout != torch.strided:
        kind = str(value.layout).removeprefix("torch.")
        return (
            f"is a tensor of layout {kind}, which a checkpoint has no place for: save its to_dense(), or "
            "what it is made of, such as its indices() and values()"
        )
    try:
        pickle.dumps(type(value))
    except (AttributeError, pickle.PicklingError):
        return (
            f"is of the class {type(value).__qualname__}, which cannot be pickled by its name: define it at "
            "the top of a module, or save as_subclass(torch.Tensor)"
        )
    return None


def _true(tensor: torch.Tensor, item: WriteItem) -> torch.Tensor:
    """The tensor, if it can be saved and has the shape that readers will take it to have."""
    require_plain(item.index.fqn, tensor)
    if item.tensor_data is not None and tensor.shape != item.tensor_data.chunk.sizes:
        key = item.index.fqn
        raise CheckpointError(
            f"{key}: a shard has shape {list(tensor.shape)}, but by its tensor's shape and sharding it has "
            f"{list(item.tensor_data.chunk.sizes)}: give the DTensor the parts that its placements call for",
            code="keys.shape",
            key=key,
        )
    return tensor


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, over a storage that holds nothing else."""
    tensor = tensor.detach().cpu()
    # `torch.save` writes the whole storage, and a view's can be far larger.
    return tensor if tensor.untyped_storage().size() == tensor.nbytes else tensor.clone()
