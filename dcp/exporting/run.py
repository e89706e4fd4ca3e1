"""`export` and `plan_export`: a checkpoint to a file that anything can load, in bounded memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, get_args

from dcp.checkpoint import Checkpoint, changes, open_checkpoint
from dcp.checks.files import NEWER_SECONDS, check_files
from dcp.checks.tiling import check_tensor
from dcp.dtypes import ITEMSIZE
from dcp.errors import ChangedError, NotLoadableError, ResourceError, UsageError
from dcp.exporting import machine
from dcp.exporting.casts import needs_torch, output_dtype
from dcp.exporting.pump import Pump
from dcp.exporting.renaming import parse_rename
from dcp.exporting.report import (
    CastDtype,
    ExportedFile,
    ExportPlan,
    ExportReport,
    Format,
    PlannedFile,
    require_fitting,
)
from dcp.exporting.safetensors_export import SafetensorsExport, lay_out
from dcp.exporting.safetensors_layout import MAX_SHARD_SIZE
from dcp.exporting.selection import Selected, Selection, select
from dcp.exporting.sink import HashingSink
from dcp.exporting.tensor_stream import Progress
from dcp.exporting.ties import ties
from dcp.exporting.torch_export import (
    Stream,
    content_bytes,
    largest_decoded,
    prepare,
    require_savable,
)
from dcp.exporting.torch_file import archive_name_for
from dcp.findings import Finding, errors_of
from dcp.index import Entry, TensorEntry
from dcp.record import Record
from dcp.storage import normalise_url, open_parent

MEMORY_BUDGET = 512 << 20
"""Default bound on the process's memory, in bytes."""

_BAND = 8 << 20
_SMALLEST_BAND = 64 << 10
_PROCESS = 96 << 20
_TORCH = 300 << 20
_CAST_BUFFERS = 8
"""Bands that a cast may hold: an element can become eight times as wide."""
_LOCAL_RATE = 700e6
_REMOTE_RATE = 100e6

_TIE_BUFFERS = 2
"""Bands that looking for equal tensors holds beside those being read."""


def export(
    url: str,
    dest: str,
    *,
    format: Format = "torch",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Sequence[str] = (),
    strip_prefix: str | None = None,
    dtype: CastDtype | None = None,
    tie: bool = False,
    max_shard_size: int = MAX_SHARD_SIZE,
    memory_budget: int = MEMORY_BUDGET,
    allow_pickle: bool = False,
    progress: Progress | None = None,
    dest_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> ExportReport:
    """Write a checkpoint as one `torch.save` file, or as safetensors.

    Args:
        url: the checkpoint.
        dest: path or URL of the file, which appears only when it is whole. For safetensors either
            ``NAME.safetensors`` or a directory of shards, whose index appears last.
        format: ``"torch"`` or ``"safetensors"``, which holds tensors only.
        include, exclude: globs on dotted keys.
        rename: ``REGEX=>TEXT`` rules on dotted keys.
        strip_prefix: taken off every key.
        dtype: what floating tensors are cast to; others and complex ones stay as they are.
        tie: let equal tensors share one storage, or for safetensors keep only the first; reads those that may
            be equal twice.
        max_shard_size: bytes of tensors in one safetensors file.
        memory_budget: bytes the process may use.
        allow_pickle: keep objects of classes that are on no list.
        progress: called with bytes done and bytes in all.
        dest_options: passed to the filesystem of ``dest``; ``options`` if absent.
        options: passed to the filesystem of ``url``.

    Raises:
        UsageError: a pattern, name or destination makes no sense.
        NotLoadableError: the checkpoint is damaged in what was asked for; carries the findings.
        ChangedError: it changed while it was read; nothing was written.
        ResourceError: the budget is too small, or memory or disk will not suffice; nothing was written.
        StorageError: storage failed; nothing was written.
    """
    started = time.perf_counter()
    checkpoint, chosen, warnings = _choose(url, dest, format, include, exclude, rename, strip_prefix, options)
    threads, band_bytes, memory = _memory(checkpoint, chosen, memory_budget, dtype, tie)
    store, name = open_parent(dest, **(options if dest_options is None else dest_options))

    def finished() -> None:
        _require_unchanged(checkpoint)

    tensors = [item.entry for item in chosen if isinstance(item.entry, TensorEntry)]
    tied = ties(checkpoint, tensors, band_bytes=band_bytes, threads=threads) if tie else {}
    names = {item.entry.key: item.key for item in chosen}
    stream: Stream | SafetensorsExport
    if format == "safetensors":
        shards, findings = lay_out(
            checkpoint, chosen, name=name, max_shard_size=max_shard_size, dtype=dtype, tied=tied
        )
        machine.require_room(memory, sum(shard.size for shard in shards), normalise_url(dest))
        stream = SafetensorsExport(checkpoint, shards, band_bytes=band_bytes, threads=threads)
        stream.write(store, finished=finished, progress=progress)
        files = stream.files
    else:
        machine.require_room(memory, _written(chosen, dtype), normalise_url(dest))
        prepared = prepare(checkpoint, chosen, dtype=dtype, tied=tied, allow_pickle=allow_pickle)
        findings = prepared.findings
        stream = Stream(
            checkpoint, prepared, band_bytes=band_bytes, threads=threads, archive_name=archive_name_for(name)
        )
        with store.writer(name) as target, HashingSink(target) as sink:
            stream.write(sink, progress)
            finished()
        stream.tensors.update({names[key]: stream.tensors[names[kept]] for key, kept in tied.items()})
        files = [ExportedFile(name=name, size=sink.size, sha256=sink.sha256, crc32c=sink.crc32c)]
    return ExportReport(
        checkpoint=checkpoint.url,
        fingerprint=checkpoint.fingerprint,
        dest=normalise_url(dest),
        format=format,
        dtype=dtype,
        tied={names[key]: names[kept] for key, kept in tied.items()},
        ok=True,
        files=files,
        tensors=stream.tensors,
        bytes_read=stream.pump.bytes_read,
        bytes_written=sum(file.size for file in files),
        seconds=round(time.perf_counter() - started, 3),
        peak_memory=machine.peak_memory(),
        findings=[*warnings, *findings],
    )


def plan_export(
    url: str,
    dest: str,
    *,
    format: Format = "torch",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Sequence[str] = (),
    strip_prefix: str | None = None,
    dtype: CastDtype | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
    memory_budget: int = MEMORY_BUDGET,
    dest_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> ExportPlan:
    """What `export` would take, from the index alone. Arguments and errors as there; nothing is written."""
    checkpoint, chosen, _ = _choose(url, dest, format, include, exclude, rename, strip_prefix, options)
    _, _, memory = _memory(checkpoint, chosen, memory_budget, dtype, tie=False)
    _, name = open_parent(dest, **(options if dest_options is None else dest_options))
    size = content_bytes(chosen)
    files = [PlannedFile(name=name, bytes=_written(chosen, dtype))]
    if format == "safetensors":
        shards, _ = lay_out(checkpoint, chosen, name=name, max_shard_size=max_shard_size, dtype=dtype)
        files = [PlannedFile(name=shard.name, bytes=shard.size) for shard in shards]
        size = sum(tensor.entry.nbytes for shard in shards for tensor in shard.tensors)
    remote = "://" in checkpoint.url or "://" in normalise_url(dest)
    return ExportPlan(
        checkpoint=checkpoint.url,
        dest=normalise_url(dest),
        format=format,
        files=files,
        memory=memory,
        memory_available=machine.memory_left(),
        disk_free=machine.disk_left(normalise_url(dest)),
        disk=sum(file.bytes for file in files),
        bytes=size,
        seconds=round(1 + size / (_REMOTE_RATE if remote else _LOCAL_RATE), 1),
        keys=len(chosen),
        tensors=sum(isinstance(item.entry, TensorEntry) for item in chosen),
    )


def _choose(
    url: str,
    dest: str,
    format: Format,
    include: Sequence[str],
    exclude: Sequence[str],
    rename: Sequence[str],
    strip_prefix: str | None,
    options: dict[str, Any],
) -> tuple[Checkpoint, list[Selected], list[Finding]]:
    selection = Selection(
        tuple(include), tuple(exclude), tuple(parse_rename(rule) for rule in rename), strip_prefix
    )
    require_fitting(dest, format)
    checkpoint = open_checkpoint(url, **options)
    if (normalise_url(dest) + "/").startswith(checkpoint.url + "/"):
        raise UsageError(f"{dest} lies inside the checkpoint; choose a destination outside it")
    chosen = select(checkpoint.index, selection)
    if format == "torch":
        require_savable(chosen)
    return checkpoint, chosen, _require_whole(checkpoint, chosen)


def _require_whole(checkpoint: Checkpoint, chosen: Sequence[Selected]) -> list[Finding]:
    """Refuse what would come out with holes; warnings that the times of the files give are returned.

    Times alone refuse nothing, because a copy does not keep them: the bytes are judged, by their CRC.
    """
    keys = {item.entry.key for item in chosen}
    files = {record.path for item in chosen for record in _records(item.entry)}
    faults: list[Finding] = []
    warnings: list[Finding] = []
    for found in check_files(checkpoint, newer_seconds=NEWER_SECONDS, copied=True):
        cut = found.detail.get("keys")
        concerned = keys.isdisjoint(cut) is False if isinstance(cut, list) else found.file in files
        if found.severity == "error" and (found.key in keys or concerned):
            faults.append(found)
        elif found.code == "files.newer-than-metadata" and found.file in files:
            warnings.append(found)
    for item in chosen:
        if isinstance(item.entry, TensorEntry):
            faults += errors_of(check_tensor(item.entry))
    if faults:
        raise NotLoadableError(
            f"{checkpoint.url} is damaged and was not exported: {faults[0].message}"
            + (f" (and {len(faults) - 1} more findings)" if len(faults) > 1 else ""),
            faults,
        )
    return warnings


def _records(entry: Entry) -> Iterator[Record]:
    records = entry.chunks.records if isinstance(entry, TensorEntry) else (entry.record,)
    return (record for record in records if record is not None)


def _memory(
    checkpoint: Checkpoint, chosen: Sequence[Selected], budget: int, dtype: CastDtype | None, tie: bool
) -> tuple[int, int, int]:
    """Threads, bytes of a band, and the peak memory expected, so that the peak stays within ``budget``."""
    threads = 8 if "://" in checkpoint.url else 2
    objects = sum(
        item.entry.record.length
        for item in chosen
        if not isinstance(item.entry, TensorEntry) and item.entry.record is not None
    )
    fixed = _PROCESS + 2 * objects + largest_decoded(chosen) + 1000 * len(checkpoint.index.entries)
    if dtype is not None and dtype not in get_args(CastDtype):
        raise UsageError(f"{dtype} is no type to cast to; use one of {', '.join(get_args(CastDtype))}")
    types = {item.entry.dtype for item in chosen if isinstance(item.entry, TensorEntry)}
    if any(needs_torch(source, output_dtype(source, dtype)) for source in types):
        fixed += _TORCH
    buffers = Pump.memory(1, threads) + (_CAST_BUFFERS if dtype else 0) + (_TIE_BUFFERS if tie else 0)
    band = min(_BAND, (budget - fixed) // buffers)
    if band < _SMALLEST_BAND:
        needed = fixed + buffers * _SMALLEST_BAND
        raise ResourceError(f"a memory budget of {budget} bytes is too small; at least {needed} are needed")
    return threads, band, fixed + buffers * band


def _written(chosen: Sequence[Selected], dtype: CastDtype | None) -> int:
    """Bytes of a `torch.save` file as far as the index tells."""
    return content_bytes(chosen) + sum(
        prod(entry.shape) * (ITEMSIZE[output_dtype(entry.dtype, dtype)] - ITEMSIZE[entry.dtype])
        for entry in (item.entry for item in chosen)
        if isinstance(entry, TensorEntry)
    )


def _require_unchanged(checkpoint: Checkpoint) -> None:
    for found in changes(checkpoint):
        raise ChangedError(
            f"{checkpoint.url}: {found.message}; nothing was written", code=found.code, file=found.file
        )
