"""What a checkpoint holds, without judging it: `inspect` and its report."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from os import PathLike
from typing import Any, Literal

from dcp.checkpoint import Kind, fingerprint_of_step, open_checkpoint, survey
from dcp.findings import Report
from dcp.index import Entry, TensorEntry
from dcp.producer import guess_producer

_WRITER = re.compile(r"(?:.*/)?__(\d{1,9})_\d+\.distcp", re.ASCII)


class KeyInfo(Report):
    """One key. ``shape`` in elements; ``bytes`` is a tensor's size in memory, an object's in storage."""

    key: str
    kind: Literal["tensor", "bytes"]
    shape: list[int] | None
    dtype: str | None
    chunks: int
    bytes: int


class FileInfo(Report):
    """One object of the checkpoint. ``records`` counts index entries that refer to it."""

    name: str
    bytes: int
    records: int


class Totals(Report):
    """Sums over the keys shown, and over all files."""

    keys: int
    tensors: int
    objects: int
    chunks: int
    bytes: int
    files: int
    file_bytes: int
    ranks: int
    """Ranks that wrote data, by the names of their files, also of those that are not there any more."""


class InspectReport(Report):
    """What `ckpt inspect` prints."""

    checkpoint: str
    producer: str
    version: str | None
    fingerprint: str
    keys: list[KeyInfo]
    files: list[FileInfo]
    totals: Totals


def inspect(url: str | PathLike[str], keys: str | None = None, **options: Any) -> InspectReport:
    """Keys, shapes, types, chunking and files of a checkpoint, or of a step of several.

    Args:
        url: the checkpoint; names of keys and files of a step of several parts begin with the part.
        keys: show only keys matching this glob.
        options: passed to the filesystem.

    Raises:
        UsageError, MetadataError, NotLoadableError, StorageError: as `dcp.checkpoint.open_checkpoint`.
    """
    found = survey(url, **options)
    if found.kind is Kind.PARTS:
        parts = {f"{name}/": open_checkpoint(found.part(name)) for name in found.parts}
    else:
        parts = {"": open_checkpoint(found)}
    shown = [
        _key(entry, prefix + key)
        for prefix, checkpoint in parts.items()
        for key, entry in checkpoint.index.entries.items()
        if keys is None or fnmatchcase(prefix + key, keys)
    ]
    counts = {
        prefix + name: count
        for prefix, checkpoint in parts.items()
        for name, count in checkpoint.index.files().items()
    }
    files = [
        FileInfo(name=name, bytes=info.size, records=counts.get(name, 0))
        for name, info in found.objects.items()
    ]
    written = {*counts, *found.objects}
    first = next(iter(parts.values()))
    return InspectReport(
        checkpoint=found.store.url,
        producer=guess_producer(found, first.index),
        version=first.index.version,
        fingerprint=fingerprint_of_step(found, list(parts.values())),
        keys=shown,
        files=files,
        totals=Totals(
            keys=len(shown),
            tensors=sum(info.kind == "tensor" for info in shown),
            objects=sum(info.kind == "bytes" for info in shown),
            chunks=sum(info.chunks for info in shown if info.kind == "tensor"),
            bytes=sum(info.bytes for info in shown),
            files=len(files),
            file_bytes=sum(info.bytes for info in files),
            ranks=len({rank for each in written if (rank := writer_rank(each)) is not None}),
        ),
    )


def writer_rank(name: str) -> int | None:
    """The rank that wrote an object, by the object's name; None where the name does not tell."""
    match = _WRITER.fullmatch(name)
    return int(match[1]) if match else None


def _key(entry: Entry, name: str) -> KeyInfo:
    if isinstance(entry, TensorEntry):
        return KeyInfo(
            key=name,
            kind="tensor",
            shape=list(entry.shape),
            dtype=entry.dtype,
            chunks=len(entry.chunks),
            bytes=entry.nbytes,
        )
    length = entry.record.length if entry.record is not None else 0
    return KeyInfo(key=name, kind="bytes", shape=None, dtype=None, chunks=1, bytes=length)
