"""The memory of an export: how many threads and how large bands keep its peak within a budget.

`buffers_within` makes `Buffers` from the index alone: what the process, the objects and the index take is
fixed, and the rest is divided into bands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from dcp.checkpoint import Checkpoint
from dcp.errors import ResourceError, UsageError
from dcp.exporting.bands import MOST_PIECES
from dcp.exporting.casts import needs_torch, output_dtype
from dcp.exporting.pump import LOCAL_BAND, REMOTE_BAND, Pump
from dcp.exporting.report import CastDtype
from dcp.exporting.selection import Selected
from dcp.exporting.torch_export import largest_decoded
from dcp.index import TensorEntry
from dcp.sizes import human_bytes, mebibytes
from dcp.storage.uploads import UPLOAD_MEMORY
from dcp.storage.urls import split_protocol

MEMORY_BUDGET = 512 << 20
"""Default bound on the process's memory, in bytes."""

_SMALLEST_BAND = 64 << 10
_PROCESS = 96 << 20
_FSSPEC = 112 << 20
"""What S3's packages take, and the answers that they hold; so do other filesystems of fsspec."""
_TORCH = 300 << 20
_CAST_BUFFERS = 8
"""Bands that a cast may hold: an element can become eight times as wide."""
_TIE_BUFFERS = 2
"""Bands that looking for equal tensors holds beside those being read."""
_TENSOR, _OBJECT, _CHUNK, _PIECE = 4500, 1000, 300, 3000
"""Bytes of memory for a tensor, from the index to the report, and for an object beside its record; for one
chunk, and for a piece of a chunk that is read."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """What an export reads with."""

    threads: int
    """Requests in flight."""
    band_bytes: int
    """Bytes of one band."""
    peak: int
    """Most memory that the process is expected to take, in bytes."""


def buffers_within(
    budget: int,
    checkpoint: Checkpoint,
    chosen: Sequence[Selected],
    *,
    dtype: CastDtype | None,
    tie: bool,
    dest: str,
) -> Buffers:
    """The buffers with which an export stays within ``budget`` bytes of memory.

    Args:
        budget: bytes that the process may use.
        checkpoint: what is read.
        chosen: what goes out.
        dtype: what floating tensors are cast to.
        tie: whether equal tensors are looked for.
        dest: URL of where it goes, normalised.

    Raises:
        UsageError: ``dtype`` is no type to cast to.
        ResourceError: the budget is too small.
    """
    remote = "://" in checkpoint.url
    threads = 8 if remote else 2
    objects = sum(
        item.entry.record.length
        for item in chosen
        if not isinstance(item.entry, TensorEntry) and item.entry.record is not None
    )
    fixed = _PROCESS + 2 * objects + largest_decoded(chosen) + _index_memory(checkpoint, chosen, threads)
    if "://" in dest:
        fixed += UPLOAD_MEMORY
    if any(split_protocol(url)[0] not in ("file", "gs", "gcs") for url in (checkpoint.url, dest)):
        fixed += _FSSPEC
    if dtype is not None and dtype not in get_args(CastDtype):
        raise UsageError(f"{dtype} is no type to cast to; use one of {', '.join(get_args(CastDtype))}")
    types = {item.entry.dtype for item in chosen if isinstance(item.entry, TensorEntry)}
    if any(needs_torch(source, output_dtype(source, dtype)) for source in types):
        fixed += _TORCH
    buffers = Pump.memory(1, threads) + (_CAST_BUFFERS if dtype else 0) + (_TIE_BUFFERS if tie else 0)
    band = min(REMOTE_BAND if remote else LOCAL_BAND, (budget - fixed) // buffers)
    if band < _SMALLEST_BAND:
        needed = fixed + buffers * _SMALLEST_BAND
        raise ResourceError(
            f"a memory budget of {human_bytes(budget)} is too small for this export; "
            f"give at least --memory-budget {mebibytes(needed)}"
        )
    return Buffers(threads, band, fixed + buffers * band)


def _index_memory(checkpoint: Checkpoint, chosen: Sequence[Selected], threads: int) -> int:
    """Bytes that keys and chunks take, the chunks of one tensor, and their pieces in the bands under way."""
    index = checkpoint.index
    keys = _TENSOR * len(index.tensors) + _OBJECT * len(index.objects)
    chunks = len(index.objects) + sum(len(entry.chunks) for entry in index.tensors)
    most = max((len(i.entry.chunks) for i in chosen if isinstance(i.entry, TensorEntry)), default=0)
    pieces = min(most, MOST_PIECES) * (2 * threads + 2)
    return keys + _CHUNK * (chunks + most) + _PIECE * pieces
