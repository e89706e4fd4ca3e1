"""What an export takes, worked out before it begins: `plan_export`, and the choices that `export` shares.

Everything comes from the index. What only the data tells stays open: the size of a `torch.save` file that
holds objects, since its pickle begins with them, and which tensors are tied.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from dcp.checkpoint import Checkpoint, Survey, open_checkpoint
from dcp.checks.files import NEWER_SECONDS, check_files
from dcp.checks.paths import check_paths
from dcp.checks.subclasses import looks_like_subclass
from dcp.checks.tiling import check_tensor
from dcp.dtypes import ITEMSIZE
from dcp.errors import NotLoadableError, UsageError
from dcp.exporting import machine
from dcp.exporting.budget import MEMORY_BUDGET, buffers_within
from dcp.exporting.casts import output_dtype
from dcp.exporting.destination import open_destination
from dcp.exporting.nesting import has_numbered_keys, nest
from dcp.exporting.report import (
    CastDtype,
    ExportPlan,
    Format,
    PlannedFile,
    PlannedRead,
    PlannedTensor,
    is_directory,
    require_fitting,
)
from dcp.exporting.safetensors_export import lay_out, metadata_of, require_directory
from dcp.exporting.safetensors_layout import INDEX, MAX_SHARD_SIZE, Shard, index_of
from dcp.exporting.selection import Selected, Selection, select, taken
from dcp.exporting.standing import look
from dcp.exporting.state import TensorSpec, build_state
from dcp.exporting.ties import sampled_bytes
from dcp.exporting.torch_export import content_bytes, require_savable
from dcp.exporting.torch_file import archive_name_for, plan_torch_file
from dcp.findings import Finding, errors_of, finding
from dcp.index import Entry, TensorEntry
from dcp.record import Record
from dcp.records import Records
from dcp.storage import normalise_url

_BESIDE = 600
"""Bytes that a `torch.save` file takes for a tensor beside its content, and a quarter of its own."""
_LOCAL_RATE = 700e6
_REMOTE_RATE = 100e6


def plan_export(
    url: str | Survey,
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
    allow_pickle: bool = False,  # noqa: ARG001 - a request of `export`; what it keeps only the data tells
    rate: float | None = None,
    detail: bool = False,
    dest_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> ExportPlan:
    """What `export` would take, from the index alone; nothing is written. Arguments as there.

    Args:
        url: the checkpoint, or a survey of it, whose index is then read once for all that it is given to.
        rate: bytes a second that exports of this kind were measured to read; a guess if absent.
        detail: say of every tensor where it will stand, and which bytes it is read from.

    Raises:
        UsageError, MetadataError, NotLoadableError, StorageError: as `export`.
        ResourceError: the memory budget is too small. What the machine lacks is in the plan's ``refusals``.
    """
    selection = Selection.of(include, exclude, rename, strip_prefix)
    checkpoint, chosen, _ = choose(url, dest, format, selection, options)
    memory = buffers_within(
        memory_budget, checkpoint, chosen, dtype=dtype, tie=tie, dest=normalise_url(dest)
    ).peak
    store, name = open_destination(
        dest, options if dest_options is None else dest_options, directory=is_directory(dest, format)
    )
    tensors = [item for item in chosen if isinstance(item.entry, TensorEntry)]
    if format == "safetensors":
        shards, _ = lay_out(checkpoint, chosen, name=name, max_shard_size=max_shard_size, dtype=dtype)
        if is_directory(dest, format):
            require_directory(store, name)
            shards = look(store.child(name)).named_apart(shards, metadata_of(checkpoint))
        held = {tensor.entry.key for shard in shards for tensor in shard.tensors}
        read = [item for item in tensors if item.entry.key in held]
        files = [
            PlannedFile(
                name=shard.name,
                bytes=shard.size,
                exact=not tie,
                tensors=_placed(
                    read, dtype, {key: stored.start for key, stored in shard.stored().items()}, tie
                )
                if detail
                else [],
            )
            for shard in shards
        ]
        beside = index_size(checkpoint, shards)
        if beside:
            files.append(PlannedFile(name=f"{name}/{INDEX}", bytes=beside, exact=not tie))
    else:
        files = [_torch_file(checkpoint, chosen, name, dtype, tie, detail)]
        read = chosen
    sources, ranges, total = _stored(read)
    if tie:
        total += sampled_bytes(item.entry for item in tensors if isinstance(item.entry, TensorEntry))
    disk = sum(file.bytes for file in files)
    remote = "://" in checkpoint.url or "://" in normalise_url(dest)
    assumed = rate or (_REMOTE_RATE if remote else _LOCAL_RATE)
    return ExportPlan(
        checkpoint=checkpoint.url,
        dest=normalise_url(dest),
        format=format,
        files=files,
        memory=memory,
        memory_available=machine.memory_to_be_had(),
        disk=disk,
        disk_free=machine.disk_left(normalise_url(dest)),
        refusals=machine.shortfalls(memory, disk, normalise_url(dest)),
        bytes=total,
        ranges=ranges,
        sources=len(sources),
        seconds=round(1 + total / assumed, 1),
        rate=assumed,
        rate_measured=rate is not None,
        keys=len(chosen),
        tensors=len(tensors),
    )


def index_size(checkpoint: Checkpoint, shards: Sequence[Shard]) -> int:
    """Bytes of the index that stands beside shards in a directory; 0 for one file."""
    return len(index_of(shards, metadata_of(checkpoint))) if "/" in shards[0].name else 0


def _torch_file(
    checkpoint: Checkpoint,
    chosen: Sequence[Selected],
    name: str,
    dtype: CastDtype | None,
    tie: bool,
    detail: bool,
) -> PlannedFile:
    """The one file, to the byte where nothing but the index decides it."""
    archive_name = archive_name_for(name)
    tensors = [item for item in chosen if isinstance(item.entry, TensorEntry)]
    settled = len(tensors) == len(chosen) and not tie and not has_numbered_keys(checkpoint.index, chosen)
    if not settled:
        listed = _placed(tensors, dtype, {}, tie) if detail else []
        return PlannedFile(name=name, bytes=written(chosen, dtype), exact=False, tensors=listed)
    specs = {
        item.key: TensorSpec.contiguous(output_dtype(item.entry.dtype, dtype), item.entry.shape)
        for item in tensors
        if isinstance(item.entry, TensorEntry)
    }
    state = build_state(nest([(item, specs[item.key]) for item in tensors]))
    plan = plan_torch_file(len(state.pickle), state.sizes, archive_name=archive_name)
    starts = {storage: entry.start for (_, storage), entry in zip(state.storages, plan.storages, strict=True)}
    places = {key: starts[spec.storage] for key, spec in specs.items()}
    return PlannedFile(
        name=name, bytes=plan.size, exact=True, tensors=_placed(tensors, dtype, places, tie) if detail else []
    )


def _placed(
    chosen: Iterable[Selected], dtype: str | None, starts: Mapping[str, int], tie: bool
) -> list[PlannedTensor]:
    """Tensors with what they are read from; those of one file, if ``starts`` knows where they stand in it."""
    placed = []
    for item in chosen:
        entry = item.entry
        if isinstance(entry, TensorEntry) and (not starts or item.key in starts):
            goes_out = output_dtype(entry.dtype, dtype)
            placed.append(
                PlannedTensor(
                    name=item.key,
                    dtype=goes_out,
                    shape=list(entry.shape),
                    offset=None if tie else starts.get(item.key),
                    bytes=prod(entry.shape) * ITEMSIZE[goes_out],
                    reads=[
                        PlannedRead(file=record.path, offset=record.offset, length=record.length)
                        for record in records_of(entry)
                    ],
                )
            )
    return placed


def choose(
    url: str | Survey,
    dest: str,
    format: Format,
    selection: Selection,
    options: dict[str, Any],
) -> tuple[Checkpoint, list[Selected], list[Finding]]:
    """Open the checkpoint and select from it; refuse what cannot be exported. With warnings."""
    require_fitting(dest, format)
    checkpoint = open_checkpoint(url, **options)
    require_outside(checkpoint.url, dest)
    chosen = select(checkpoint.index, selection, url=checkpoint.url)
    if format == "torch":
        require_savable(chosen)
    chosen, left_out = _plain(checkpoint, chosen)
    return checkpoint, chosen, [*left_out, *_require_whole(checkpoint, chosen, selection)]


def require_outside(url: str, dest: str) -> None:
    """Refuse a destination inside the checkpoint at ``url``, with a `UsageError`."""
    if f"{_real(normalise_url(dest))}/".startswith(f"{_real(url)}/"):
        raise UsageError(f"{dest} lies inside the checkpoint; choose a destination outside it")


def _plain(checkpoint: Checkpoint, chosen: Sequence[Selected]) -> tuple[list[Selected], list[Finding]]:
    """What was chosen without tensors of classes of their own, and a warning for each of those."""
    records = Records(checkpoint.store, checkpoint.objects)
    kept: list[Selected] = []
    left_out: list[Finding] = []
    for item in chosen:
        entry = item.entry
        if isinstance(entry, TensorEntry) and looks_like_subclass(records, entry):
            left_out.append(
                finding(
                    "export.skipped-object",
                    f"{entry.key} is left out: it is of a tensor class of its own, as quantized weights are",
                    key=entry.key,
                    tensor=True,
                )
            )
        else:
            kept.append(item)
    if left_out and not kept:
        raise UsageError(f"nothing is left to write: {left_out[0].message}")
    return kept, left_out


def _real(url: str) -> str:
    """A local path without links; any other URL as it is."""
    return url if "://" in url else os.path.realpath(url)


def _require_whole(checkpoint: Checkpoint, chosen: Sequence[Selected], selection: Selection) -> list[Finding]:
    """Refuse what would come out with holes; what else is strange about it is returned as warnings.

    Times alone refuse nothing, because a copy does not keep them: the bytes are judged, by their CRC.
    """
    keys = {item.entry.key for item in chosen}
    files, _, _ = _stored(chosen)
    faults: list[Finding] = []
    warnings: list[Finding] = []
    for found in check_files(checkpoint, newer_seconds=NEWER_SECONDS, copied=True):
        cut = found.detail.get("keys")
        concerned = keys.isdisjoint(cut) is False if isinstance(cut, list) else found.file in files
        if found.severity == "error" and (found.key in keys or concerned):
            faults.append(found)
        elif found.code == "files.newer-than-metadata" and found.file in files:
            warnings.append(found)
    for found in check_paths(checkpoint.index):
        if found.severity == "warning" and found.key in keys:
            warnings.append(found)
        elif found.severity == "error" and found.key is not None and taken(found.key, selection):
            faults.append(found)
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


def _stored(chosen: Iterable[Selected]) -> tuple[set[str], int, int]:
    """Objects that what was chosen stands in, its records, and their bytes."""
    paths: set[str] = set()
    records = size = 0
    for item in chosen:
        if isinstance(item.entry, TensorEntry):
            held, count, length = item.entry.chunks.stored()
            paths |= held
            records, size = records + count, size + length
        elif item.entry.record is not None:
            paths.add(item.entry.record.path)
            records, size = records + 1, size + item.entry.record.length
    return paths, records, size


def records_of(entry: Entry) -> Iterator[Record]:
    """Where an entry's bytes are."""
    records = entry.chunks.records if isinstance(entry, TensorEntry) else (entry.record,)
    return (record for record in records if record is not None)


def written(chosen: Sequence[Selected], dtype: CastDtype | None) -> int:
    """Bytes of a `torch.save` file as far as the index tells, and rather more than less."""
    return (
        content_bytes(chosen)
        + _BESIDE * (len(chosen) + 4)
        + sum(
            prod(entry.shape) * (ITEMSIZE[output_dtype(entry.dtype, dtype)] - ITEMSIZE[entry.dtype])
            for entry in (item.entry for item in chosen)
            if isinstance(entry, TensorEntry)
        )
    )
