"""A safetensors export as units that any number of workers can do, in any order, and do again.

`claimed_shards` keeps everybody else out of the directory from the plan to the index. `plan_shards` says
which shards there will be. `write_shard` writes one of them: it needs nothing but its number, and writing it
again gives the same bytes. `finish_shards` writes the index that makes them an export.
`dcp.exporting.export` does all of it in one process.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from dcp.checkpoint import Checkpoint
from dcp.errors import ChangedError, EnvironmentFault, NotFoundError, UsageError
from dcp.exporting import machine
from dcp.exporting.budget import MEMORY_BUDGET, Buffers, buffers_within
from dcp.exporting.casts import overflows
from dcp.exporting.planning import choose, require_outside
from dcp.exporting.report import (
    CastDtype,
    ExportedFile,
    ExportedTensor,
    ExportReport,
    PlannedFile,
)
from dcp.exporting.safetensors_export import SafetensorsExport, lay_out, metadata_of, require_directory
from dcp.exporting.safetensors_layout import INDEX, MAX_SHARD_SIZE, SUFFIX, Shard, index_of
from dcp.exporting.selection import Selected, Selection
from dcp.exporting.sink import ChecksumSink, HashingSink
from dcp.exporting.standing import clear, clear_replaced, look, withdraw
from dcp.exporting.ties import ties
from dcp.exporting.unchanged import change_told, require_unchanged
from dcp.findings import Finding, Report
from dcp.index import TensorEntry
from dcp.storage import Store, normalise_url, open_parent
from dcp.storage.store import Held


@dataclass(frozen=True, slots=True)
class ShardedExport:
    """What is exported; the fields are the arguments of `dcp.exporting.export`. ``dest`` is a directory."""

    url: str
    dest: str
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rename: tuple[str, ...] = ()
    strip_prefix: str | None = None
    dtype: CastDtype | None = None
    tie: bool = False
    max_shard_size: int = MAX_SHARD_SIZE
    memory_budget: int = MEMORY_BUDGET
    """Bytes that writing one shard may use."""
    sha256: bool = False
    options: Mapping[str, Any] | None = None
    dest_options: Mapping[str, Any] | None = None


class ShardPlan(Report):
    """The shards of an export. ``fingerprint`` is that of the checkpoint they are made from."""

    checkpoint: str
    fingerprint: str
    shards: list[PlannedFile]
    tied: dict[str, str] = Field(default_factory=dict)
    """Keys of tensors that repeat another one and are left out, with the key of that one."""
    findings: list[Finding]


class WrittenShard(Report):
    """One shard that stands."""

    number: int
    """From 0."""
    file: ExportedFile
    tensors: dict[str, ExportedTensor]
    bytes_read: int
    peak_memory: int


def plan_shards(export: ShardedExport) -> ShardPlan:
    """How the export is cut up, and into which files; nothing is written.

    With ``tie`` tensors that may be equal are read. Names of files depend on what stands in the directory: it
    must stay claimed from here on.

    Raises:
        UsageError: ``dest`` names a single file, or as `dcp.exporting.export`.
        NotLoadableError, ResourceError, StorageError: as `dcp.exporting.export`.
    """
    checkpoint, chosen, warnings = _chosen(export)
    buffers = _buffers(export, checkpoint, chosen, tie=export.tie)
    tensors = [item.entry for item in chosen if isinstance(item.entry, TensorEntry)]
    tied = (
        ties(checkpoint, tensors, band_bytes=buffers.band_bytes, threads=buffers.threads)
        if export.tie
        else {}
    )
    shards, left_out = _shards(export, checkpoint, chosen, tied)
    store, name = _place(export)
    shards = look(store.child(name)).named_apart(shards, metadata_of(checkpoint))
    return ShardPlan(
        checkpoint=checkpoint.url,
        fingerprint=checkpoint.fingerprint,
        shards=[PlannedFile(name=shard.name, bytes=shard.size, exact=True) for shard in shards],
        tied=dict(tied),
        findings=[*warnings, *left_out],
    )


def write_shard(export: ShardedExport, plan: ShardPlan, number: int) -> WrittenShard:
    """Write the shard of this number, from 0. An older export in the directory stays as it is.

    Raises:
        ChangedError: the checkpoint is not the planned one any more.
        CheckpointError, ResourceError, StorageError: as `dcp.exporting.export`; the shard is not there.
    """
    checkpoint, chosen, _ = _chosen(export)
    _require_planned(checkpoint, plan)
    shards = _planned(export, checkpoint, chosen, plan)
    buffers = _buffers(export, checkpoint, chosen, tie=False)
    shard = shards[number]
    machine.require_room(buffers.peak, shard.size, normalise_url(export.dest))
    store, name = _place(export)
    require_directory(store, name)
    writer = SafetensorsExport(
        checkpoint,
        [shard],
        band_bytes=buffers.band_bytes,
        threads=buffers.threads,
        sink_type=_sink(export),
    )
    with change_told(checkpoint):
        writer.write_alone(store, finished=lambda: require_unchanged(checkpoint))
    return WrittenShard(
        number=number,
        file=writer.files[0],
        tensors=writer.tensors,
        bytes_read=writer.pump.bytes_read,
        peak_memory=machine.peak_memory(),
    )


def finish_shards(
    export: ShardedExport, plan: ShardPlan, written: Sequence[WrittenShard], *, held: Held, started: float
) -> ExportReport:
    """Write the index over shards that all stand, and remove what an earlier export left beside them.

    Args:
        export, plan: as of the shards.
        written: every shard.
        held: of `claimed_shards`.
        started: when the export began, by `time.perf_counter`.

    Raises:
        ChangedError: the checkpoint changed since; the shards are removed.
        UsageError: a shard is missing.
        EnvironmentFault: one was removed or replaced meanwhile.
        BusyError: the claim has been lost.
        StorageError: storage failed.
    """
    if sorted(shard.number for shard in written) != list(range(len(plan.shards))):
        raise UsageError(f"{len(written)} of {len(plan.shards)} shards of {export.dest} are written")
    checkpoint, chosen, _ = _chosen(export)
    store, name = _place(export)
    try:
        _require_planned(checkpoint, plan)
    except ChangedError:
        discard_shards(export, plan)
        raise
    shards = _planned(export, checkpoint, chosen, plan)
    _require_standing(store, shards, written)
    held()
    with store.writer(f"{name}/{INDEX}") as target, _sink(export)(target) as sink:
        sink.write(index_of(shards, metadata_of(checkpoint)))
    clear_replaced(store.child(name), shards)
    order = sorted(written, key=lambda shard: shard.number)
    files = [*(shard.file for shard in order), sink.written_as(f"{name}/{INDEX}")]
    names = {item.entry.key: item.key for item in chosen}
    tensors = {key: tensor for shard in order for key, tensor in shard.tensors.items()}
    return ExportReport(
        checkpoint=checkpoint.url,
        fingerprint=checkpoint.fingerprint,
        dest=normalise_url(export.dest),
        format="safetensors",
        dtype=export.dtype,
        tied={names[key]: names[kept] for key, kept in plan.tied.items()},
        ok=True,
        files=files,
        tensors=tensors,
        bytes_read=sum(shard.bytes_read for shard in order),
        bytes_written=sum(file.size for file in files),
        seconds=round(time.perf_counter() - started, 3),
        peak_memory=max(machine.peak_memory(), *(shard.peak_memory for shard in order)),
        findings=[*plan.findings, *overflows(tensors, names)],
    )


def discard_shards(export: ShardedExport, plan: ShardPlan) -> None:
    """Remove the shards of an export that failed, but not those of an equal one that stood there before."""
    store, _ = _place(export)
    withdraw(store, [shard.name for shard in plan.shards])


@contextmanager
def claimed_shards(export: ShardedExport) -> Iterator[Held]:
    """Keep the directory for one export, from its plan to its index; what a killed one left is removed first.

    Raises:
        UsageError: it is no place for a directory of shards.
        BusyError: another export is under way there.
        StorageError: storage failed.
    """
    _require_directory(export)
    require_outside(normalise_url(export.url), export.dest)
    store, name = _place(export)
    require_directory(store, name)
    with store.claimed(name) as held:
        clear(store.child(name))
        yield held


def _require_standing(store: Store, shards: Sequence[Shard], written: Iterable[WrittenShard]) -> None:
    """An index must not lead to what somebody removed or replaced since it was written."""
    for known in written:
        shard = shards[known.number]
        try:
            info = store.info(shard.name)
            stands = (
                info.size == shard.size
                and info.crc32c in (None, known.file.crc32c)
                and store.read_range(shard.name, 0, len(shard.header)) == shard.header
            )
        except NotFoundError:
            stands = False
        if not stands:
            raise EnvironmentFault(
                f"{store.url}/{shard.name} is not there any more as it was written; is somebody else "
                "exporting to the same directory? Export again"
            )


def _require_directory(export: ShardedExport) -> None:
    if export.dest.endswith(SUFFIX):
        raise UsageError(f"{export.dest} is one file, which is one shard; name a directory")


def _planned(
    export: ShardedExport, checkpoint: Checkpoint, chosen: Sequence[Selected], plan: ShardPlan
) -> list[Shard]:
    """The shards under the names of the plan."""
    shards, _ = _shards(export, checkpoint, chosen, plan.tied)
    return [replace(shard, name=file.name) for shard, file in zip(shards, plan.shards, strict=True)]


def _chosen(export: ShardedExport) -> tuple[Checkpoint, list[Selected], list[Finding]]:
    _require_directory(export)
    selection = Selection.of(export.include, export.exclude, export.rename, export.strip_prefix)
    return choose(export.url, export.dest, "safetensors", selection, dict(export.options or {}))


def _buffers(
    export: ShardedExport, checkpoint: Checkpoint, chosen: Sequence[Selected], *, tie: bool
) -> Buffers:
    return buffers_within(
        export.memory_budget, checkpoint, chosen, dtype=export.dtype, tie=tie, dest=export.dest
    )


def _shards(
    export: ShardedExport, checkpoint: Checkpoint, chosen: Sequence[Selected], tied: Mapping[str, str]
) -> tuple[list[Shard], list[Finding]]:
    name = _place(export)[1]
    return lay_out(
        checkpoint,
        chosen,
        name=name,
        max_shard_size=export.max_shard_size,
        dtype=export.dtype,
        tied=tied,
    )


def _place(export: ShardedExport) -> tuple[Store, str]:
    options = export.options if export.dest_options is None else export.dest_options
    return open_parent(export.dest, **dict(options or {}))


def _sink(export: ShardedExport) -> type[ChecksumSink]:
    return HashingSink if export.sha256 else ChecksumSink


def _require_planned(checkpoint: Checkpoint, plan: ShardPlan) -> None:
    if checkpoint.fingerprint != plan.fingerprint:
        raise ChangedError(
            f"{checkpoint.url} changed while it was exported; nothing was published of it",
            code="files.newer-than-metadata",
        )
