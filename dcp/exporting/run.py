"""`export`: a checkpoint to a file that anything can load, in bounded memory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from dcp.exporting import machine
from dcp.exporting.budget import MEMORY_BUDGET, buffers_within
from dcp.exporting.casts import overflows
from dcp.exporting.destination import open_destination
from dcp.exporting.planning import choose, index_size, written
from dcp.exporting.report import CastDtype, ExportReport, Format, is_directory
from dcp.exporting.safetensors_export import SafetensorsExport, lay_out
from dcp.exporting.safetensors_layout import MAX_SHARD_SIZE
from dcp.exporting.selection import Selection
from dcp.exporting.sink import ChecksumSink, HashingSink
from dcp.exporting.tensor_stream import Progress
from dcp.exporting.ties import ties
from dcp.exporting.torch_export import Stream, prepare
from dcp.exporting.torch_file import archive_name_for
from dcp.exporting.unchanged import change_told, require_unchanged
from dcp.index import TensorEntry
from dcp.storage import normalise_url


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
    sha256: bool = False,
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
        allow_pickle: keep objects of classes that `torch.load` refuses by default.
        sha256: report the SHA-256 of every file, which takes a core longer than all the rest.
        progress: called with bytes done and bytes in all.
        dest_options: passed to the filesystem of ``dest``; ``options`` if absent.
        options: passed to the filesystem of ``url``.

    Raises:
        UsageError: a pattern, name, type, format or destination makes no sense.
        MetadataError: the index is unusable.
        NotLoadableError: there is no index, or the checkpoint is damaged in what was asked for; carries the
            findings.
        RecordError: a record turned out damaged when it was read; nothing was written.
        ChangedError: it changed while it was read; nothing was written.
        ResourceError: the budget is too small, or memory or disk will not suffice; nothing was written.
        StorageError: storage failed; nothing was written.
    """
    started = time.perf_counter()
    selection = Selection.of(include, exclude, rename, strip_prefix)
    checkpoint, chosen, warnings = choose(url, dest, format, selection, options)
    buffers = buffers_within(
        memory_budget, checkpoint, chosen, dtype=dtype, tie=tie, dest=normalise_url(dest)
    )
    band_bytes, threads = buffers.band_bytes, buffers.threads
    store, name = open_destination(
        dest, options if dest_options is None else dest_options, directory=is_directory(dest, format)
    )

    def finished() -> None:
        require_unchanged(checkpoint)

    tensors = [item.entry for item in chosen if isinstance(item.entry, TensorEntry)]
    with change_told(checkpoint):
        tied = ties(checkpoint, tensors, band_bytes=band_bytes, threads=threads) if tie else {}
        names = {item.entry.key: item.key for item in chosen}
        sink_type = HashingSink if sha256 else ChecksumSink
        stream: Stream | SafetensorsExport
        if format == "safetensors":
            shards, findings = lay_out(
                checkpoint, chosen, name=name, max_shard_size=max_shard_size, dtype=dtype, tied=tied
            )
            size = sum(shard.size for shard in shards) + index_size(checkpoint, shards)
            machine.require_room(buffers.peak, size, normalise_url(dest))
            stream = SafetensorsExport(
                checkpoint, shards, band_bytes=band_bytes, threads=threads, sink_type=sink_type
            )
            stream.write(store, finished=finished, progress=progress)
            files = stream.files
        else:
            machine.require_room(buffers.peak, written(chosen, dtype), normalise_url(dest))
            prepared = prepare(checkpoint, chosen, dtype=dtype, tied=tied, allow_pickle=allow_pickle)
            findings = prepared.findings
            stream = Stream(
                checkpoint,
                prepared,
                band_bytes=band_bytes,
                threads=threads,
                archive_name=archive_name_for(name),
            )
            with store.writer(name) as target, sink_type(target) as sink:
                stream.write(sink, progress)
                finished()
            stream.tensors.update({names[key]: stream.tensors[names[kept]] for key, kept in tied.items()})
            files = [sink.written_as(name)]
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
        findings=[*warnings, *findings, *overflows(stream.tensors, names)],
    )
