"""Tensors that only a class of their own can put together, as torch's own reader loads them.

Quantized tensors, and those of subclasses such as torchao's, are not read row by row: the whole record goes
through `torch.load`, which takes no more than `weights_only` does.
"""

from __future__ import annotations

import io
from pickle import UnpicklingError

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from dcp.checks.subclasses import subclass_archive
from dcp.index import Chunk, TensorEntry
from dcp.records import Records, fault


def load_foreign(
    records: Records, planner: LoadPlanner, item: ReadItem, entry: TensorEntry, chunk: Chunk
) -> bool:
    """Load a read item whole if its chunk is of a class of its own; False if it is not, and nothing was done.

    Raises:
        RecordError: torch does not know the class, or does not trust it.
        StorageError: storage failed.
    """
    archive = subclass_archive(records, entry.key, chunk.record)
    if archive is None:
        return False
    try:
        value = torch.load(io.BytesIO(archive.data), map_location="cpu", weights_only=True)
    except (UnpicklingError, AttributeError, ImportError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).strip().partition("\n")[0]
        raise fault(
            entry,
            chunk.record,
            f"it is of a class of its own, which torch.load does not take: {why} Import the library that "
            "defines the class, or name the class with torch.serialization.add_safe_globals, before the load",
            chunk=chunk,
        ) from None
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != chunk.box.sizes:
        why = "its class makes something else of it than the index says"
        raise fault(entry, chunk.record, why, chunk=chunk)
    wanted = narrow_tensor_by_index(value, item.storage_offsets, item.lengths)
    target = planner.resolve_tensor(item)
    if wanted.is_quantized and not target.is_quantized:
        dtype = str(target.dtype).removeprefix("torch.")
        why = (
            f"it is quantized ({entry.dtype}), and the tensor to load into is {dtype}: load it into a "
            "quantized tensor, and take that one's dequantize()"
        )
        raise fault(entry, chunk.record, why, code="keys.dtype", chunk=chunk)
    with torch.no_grad():
        target.copy_(wanted)
    if wanted.is_quantized and not torch.equal(
        planner.resolve_tensor(item).dequantize(), wanted.dequantize()
    ):
        # Integers are in memory that views share; scales are not.
        why = "the tensor to load into is a view with scales of its own: load into a tensor that is none"
        raise fault(entry, chunk.record, why, chunk=chunk)
    planner.commit_tensor(item, target.detach())
    return True
