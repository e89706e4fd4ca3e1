"""The index as the `Metadata` that torch's planners work with, built from values already checked.

No pickle is read on the way, so nothing in a hostile `.metadata` can run.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp.boxes import Box
from dcp.collector import gc_paused
from dcp.errors import MetadataError
from dcp.findings import Finding
from dcp.index import CheckpointIndex, Entry, ObjectEntry, TensorEntry


def torch_dtype(entry: TensorEntry) -> torch.dtype:
    """The tensor's dtype.

    Raises:
        MetadataError: ``metadata.unsupported``; this torch does not know it.
    """
    dtype = getattr(torch, entry.dtype, None)
    if isinstance(dtype, torch.dtype):
        return dtype
    raise MetadataError(
        f"{entry.key} is of dtype {entry.dtype}, which torch {torch.__version__} does not know",
        code="metadata.unsupported",
        key=entry.key,
    )


def known_to_torch(index: CheckpointIndex, findings: list[Finding]) -> tuple[CheckpointIndex, list[Finding]]:
    """What `dcp.load.preflight.preflight` gives, without the tensors whose dtype this torch does not know.

    Each tensor left out is one more finding.
    """
    kept: dict[str, Entry] = {}
    unknown: list[Finding] = []
    for entry in index.entries.values():
        try:
            if isinstance(entry, TensorEntry):
                torch_dtype(entry)
        except MetadataError as error:
            unknown.append(error.as_finding())
        else:
            kept[entry.key] = entry
    return replace(index, entries=kept), [*findings, *unknown]


def torch_chunk(box: Box) -> ChunkStorageMetadata:
    """A box in torch's terms."""
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def torch_metadata(index: CheckpointIndex) -> Metadata:
    """The whole index in torch's terms. Values of ``storage_data`` are `dcp.index.Record`.

    Raises:
        MetadataError: ``metadata.unsupported``; a dtype is not known to this torch.
    """
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored: dict[MetadataIndex, object] = {}
    with gc_paused():
        for entry in index.entries.values():
            if isinstance(entry, ObjectEntry):
                described[entry.key] = BytesStorageMetadata()
                stored[MetadataIndex(entry.key)] = entry.record
                continue
            described[entry.key] = TensorStorageMetadata(
                TensorProperties(torch_dtype(entry)),
                torch.Size(entry.shape),
                [torch_chunk(box) for box in entry.chunks.boxes],
            )
            for box, record in zip(entry.chunks.boxes, entry.chunks.records, strict=True):
                stored[MetadataIndex(entry.key, box.offsets)] = record
    return Metadata(
        state_dict_metadata=described,
        planner_data=dict(index.paths) if index.paths is not None else None,
        storage_data=stored,
        storage_meta=StorageMeta(checkpoint_id=index.checkpoint_id, save_id=index.save_id),
    )


def chunk_number(entry: TensorEntry, place: MetadataIndex) -> int:
    """The number of the chunk that a read item's storage index names, by its hint or by its offset.

    Raises:
        MetadataError: the tensor has no chunk there; the planner was given other metadata.
    """
    offset = None if place.offset is None else tuple(place.offset)
    hint = place.index
    if hint is not None and 0 <= hint < len(entry.chunks) and entry.chunks[hint].box.offsets == offset:
        return hint
    for number, chunk in enumerate(entry.chunks):
        if chunk.box.offsets == offset:
            return number
    raise MetadataError(
        f"{entry.key} has no chunk at {offset}: the plan was made from other metadata",
        code="records.missing",
        key=entry.key,
    )
