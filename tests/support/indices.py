"""Checkpoints of any shape without their bytes: a real `.metadata`, and data files that are mere holes.

All that looks at index and listing alone sees a checkpoint that is whole.
"""

import pickle
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

Region = tuple[Sequence[int], Sequence[int], int]
"""Offsets and sizes of a chunk, and the rank that wrote it."""

_HEAD = 800
"""Bytes that a record takes beside its elements."""


def write_index(directory: Path, tensors: Mapping[str, tuple[Sequence[int], Sequence[Region]]]) -> Path:
    """Write a checkpoint of bfloat16 tensors, each given by its shape and its chunks; the directory."""
    import torch
    from torch.distributed.checkpoint import metadata as format
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    directory.mkdir(parents=True, exist_ok=True)
    properties = format.TensorProperties(dtype=torch.bfloat16)
    described: dict[str, format.TensorStorageMetadata | format.BytesStorageMetadata] = {}
    stored = {}
    ends: dict[int, int] = {}
    for key, (shape, regions) in tensors.items():
        chunks = [format.ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s, _ in regions]
        described[key] = format.TensorStorageMetadata(properties, torch.Size(shape), chunks)
        for number, (offsets, sizes, rank) in enumerate(regions):
            start = ends.get(rank, 0)
            length = prod(sizes) * 2 + _HEAD
            index = format.MetadataIndex(key, torch.Size(offsets), number)
            stored[index] = _StorageInfo(f"__{rank}_0.distcp", start, length)
            ends[rank] = start + length
    for rank, size in ends.items():
        with (directory / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(size)
    with (directory / ".metadata").open("wb") as file:
        pickle.dump(format.Metadata(described, None, stored), file)
    return directory


def rows(count: int, height: int, width: int, ranks: int) -> tuple[list[int], list[Region]]:
    """A tensor of ``count`` row chunks of ``height`` by ``width``, written by the ranks in turn."""
    regions: list[Region] = [([i * height, 0], [height, width], i % ranks) for i in range(count)]
    return [count * height, width], regions
