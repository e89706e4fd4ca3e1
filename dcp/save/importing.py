"""`import_torch_save`: a `torch.save` file to a checkpoint, as if N ranks had saved it.

Every tensor is cut along dimension 0 as DTensor shards it, unless it is named as one to be kept whole;
scalars, quantized tensors and objects are rank 0's. The bytes
go from the mapped file into records of torch's own format, once and in pieces, so memory does not grow with
the file. They are held against the file's checksums as they pass; the index is written last, as
`BucketWriter` does it, and only if all of them agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from isal import isal_zlib
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from dcp.boxes import Box, Shape
from dcp.dtypes import ITEMSIZE
from dcp.errors import CheckpointError, SourceFileError, UsageError
from dcp.exporting.state import TensorSpec, build_state
from dcp.exporting.torch_file import TorchFileWriter
from dcp.findings import Report
from dcp.layout import Layout
from dcp.nested import require_distinct
from dcp.pickles.tensors import TensorNode
from dcp.pickles.writer import write
from dcp.save.files import Stream, deal
from dcp.save.torch_source import Leaf, TorchSource
from dcp.save.writer import METADATA, THREADS, BucketWriter
from dcp.storage import Store, open_store

Progress = Callable[[int, int], None]
"""Told of the bytes written so far and of all."""


class ImportedFile(Report):
    """One data file, ``size`` in bytes."""

    name: str
    size: int


class ImportReport(Report):
    """What was imported.

    Attributes:
        source: the `torch.save` file.
        checkpoint: where the checkpoint is.
        ranks: ranks it is sharded for.
        keys: how many there are; ``tensors`` of them are tensors.
        chunks: pieces of tensors.
        dropped: keys of empty dicts, for which a checkpoint has no place.
        bytes_written: of the data files.
    """

    source: str
    checkpoint: str
    ok: bool
    ranks: int
    keys: int
    tensors: int
    chunks: int
    dropped: list[str]
    files: list[ImportedFile]
    bytes_written: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Item:
    """One record to be written."""

    index: MetadataIndex
    leaf: Leaf
    box: Box | None
    """Rows of the tensor; None for an object, and for a quantized tensor."""


def import_torch_save(
    path: str,
    url: str,
    ranks: int = 1,
    *,
    whole: Sequence[str] = (),
    allow_pickle: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> ImportReport:
    """Write what a `torch.save` file holds as a checkpoint that N ranks could have saved.

    Args:
        path: a local file that holds a dict.
        url: where the checkpoint shall be.
        ranks: 1 to 1024; tensors are sharded along dimension 0, as ``fully_shard`` shards parameters.
        whole: globs of flattened keys of tensors that are not sharded. FSDP2 keeps buffers whole, such as
            ``*.running_mean``, and a file does not say which tensors are buffers. They load either way.
        allow_pickle: also take objects of classes that are not known to be harmless. None is ever run here.
        overwrite: replace a committed checkpoint.
        progress: told of the bytes done and of all.
        options: passed to the fsspec filesystem.

    Raises:
        UsageError: ``ranks`` is out of range, a glob of ``whole`` meets no tensor, the file holds
            no dict, two values have one key, or the file is of before torch 1.6.
        SourceFileError: the file is damaged or asks for a class that is not taken; nothing is left at ``url``
            then, and a checkpoint that was to be replaced is still there.
        AlreadyExistsError: a committed checkpoint is there.
        StorageError: storage failed; no checkpoint can be seen then.
    """
    started = time.perf_counter()
    layout = Layout(fsdp=ranks)
    writer = BucketWriter(url, overwrite, **options)
    store = open_store(writer.url, **options)
    with _named(path), TorchSource(path, allow_pickle=allow_pickle) as source:
        require_distinct(leaf.place for leaf in source.leaves)
        metadata, items = _plan(source.leaves, layout, _matching(source.leaves, whole))
        if overwrite and store.exists(METADATA):
            # What is there is gone before anything is written, so the file must be known to be whole.
            source.check()
        writer.prepare_global_plan([])
        copy = _Copy(source, store, _total(source.leaves), progress)
        held = {
            writer.file_name(rank, number): part
            for rank, mine in enumerate(items)
            for number, part in enumerate(deal(mine, writer.files_per_rank, _size))
        }
        threads = THREADS if "://" in writer.url else 1
        try:
            with ThreadPoolExecutor(threads, thread_name_prefix="import") as pool:
                results = list(pool.map(copy.file, held, held.values()))
            source.check()
        except BaseException:
            writer.discard(held)
            raise
        writer.finish(metadata, results)
        dropped = source.dropped
    files = [
        ImportedFile(name=name, size=sum(result.size_in_bytes for result in written))
        for name, written in zip(held, results, strict=True)
    ]
    tensors = [m for m in metadata.state_dict_metadata.values() if isinstance(m, TensorStorageMetadata)]
    return ImportReport(
        source=path,
        checkpoint=writer.url,
        ok=True,
        ranks=ranks,
        keys=len(metadata.state_dict_metadata),
        tensors=len(tensors),
        chunks=sum(len(tensor.chunks) for tensor in tensors),
        dropped=dropped,
        files=files,
        bytes_written=sum(file.size for file in files),
        seconds=round(time.perf_counter() - started, 3),
    )


@contextmanager
def _named(path: str) -> Iterator[None]:
    """What is wrong with a file that is imported is told as that, by the file's name."""
    try:
        yield
    except CheckpointError as error:
        said = str(error) if path in str(error) else f"{path}: {error}"
        detail = {name: value for name, value in error.detail.items() if name != "file"}
        raise SourceFileError(said, code=error.code, key=error.key, file=path, **detail) from error


def _matching(leaves: Sequence[Leaf], globs: Sequence[str]) -> Set[str]:
    """Keys of the tensors that are meant."""
    if isinstance(globs, str):
        raise UsageError(f"whole is one text; give a list of globs, such as [{globs!r}]")
    keys = [leaf.key for leaf in leaves if leaf.tensor is not None]
    for glob in globs:
        if not any(fnmatchcase(key, glob) for key in keys):
            raise UsageError(f"no tensor in the file has a key like {glob!r}, which was to be kept whole")
    return {key for key in keys if any(fnmatchcase(key, glob) for glob in globs)}


def _plan(leaves: Iterable[Leaf], layout: Layout, whole: Set[str]) -> tuple[Metadata, list[list[_Item]]]:
    """The index but for the records, and what each rank writes: objects first."""
    described: dict[str, Any] = {}
    objects: list[_Item] = []
    items: list[list[_Item]] = [[] for _ in range(layout.ranks)]
    for leaf in leaves:
        if leaf.quantized is not None:
            index, described[leaf.key] = _quantized(leaf.key, *leaf.quantized)
            objects.append(_Item(index, leaf, None))
            continue
        if leaf.tensor is None:
            described[leaf.key] = BytesStorageMetadata()
            objects.append(_Item(MetadataIndex(leaf.key), leaf, None))
            continue
        chunks: list[ChunkStorageMetadata] = []
        for rank, box in _shards(leaf.tensor, Layout(fsdp=1) if leaf.key in whole else layout):
            offsets = torch.Size(box.offsets)
            index = MetadataIndex(leaf.key, offsets, len(chunks))
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(box.sizes)))
            items[rank].append(_Item(index, leaf, box))
        described[leaf.key] = TensorStorageMetadata(
            _properties(leaf.tensor), torch.Size(leaf.tensor.shape), chunks
        )
    items[0] = objects + items[0]
    return Metadata(described, planner_data={leaf.key: leaf.path for leaf in leaves}), items


def _quantized(key: str, dtype: str, shape: Shape) -> tuple[MetadataIndex, TensorStorageMetadata]:
    """A tensor in one chunk. torch saves the quantized tensor itself in it, as it would an object."""
    offsets = torch.Size([0] * len(shape))
    chunk = ChunkStorageMetadata(offsets, torch.Size(shape))
    properties = TensorProperties(dtype=getattr(torch, dtype))
    return MetadataIndex(key, offsets, 0), TensorStorageMetadata(properties, torch.Size(shape), [chunk])


def _shards(tensor: TensorNode, layout: Layout) -> Iterator[tuple[int, Box]]:
    """Rank and rows. What several ranks hold, be it nothing, is the first one's, as torch saves it."""
    seen = set()
    for rank, box in enumerate(layout.boxes(tensor.shape)):
        if box.offsets not in seen:
            seen.add(box.offsets)
            yield rank, box


def _properties(tensor: TensorNode) -> TensorProperties:
    return TensorProperties(dtype=getattr(torch, tensor.dtype), requires_grad=tensor.requires_grad)


def _size(item: _Item) -> int | None:
    """Bytes of an item's elements; None for an object."""
    tensor = item.leaf.tensor
    return None if tensor is None or item.box is None else item.box.volume * ITEMSIZE[tensor.dtype]


def _total(leaves: Iterable[Leaf]) -> int:
    tensors = [leaf.tensor for leaf in leaves if leaf.tensor is not None]
    return sum(Box(t.shape, t.shape).volume * ITEMSIZE[t.dtype] for t in tensors)


class _Copy:
    """Writes data files out of the mapped one."""

    def __init__(self, source: TorchSource, store: Store, total: int, progress: Progress | None) -> None:
        self.source = source
        self.store = store
        self.total = total
        self.done = 0
        self.progress = progress

    def file(self, name: str, items: Iterable[_Item]) -> list[WriteResult]:
        results = []
        with self.store.writer(name) as sink:
            stream = Stream(sink)
            for item in items:
                start = stream.position
                if item.leaf.tensor is not None and item.box is not None:
                    self._tensor(stream, item.leaf.tensor, item.box)
                else:
                    _object(stream, item.leaf, self.source.storages(item.leaf.value))
                length = stream.position - start
                where = _StorageInfo(name, start, length)
                results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=where))
            stream.drain()
        return results

    def _tensor(self, stream: Stream, tensor: TensorNode, box: Box) -> None:
        built = build_state(TensorSpec.contiguous(tensor.dtype, box.sizes))
        record = TorchFileWriter(stream, built.pickle, built.sizes)
        [(key, _)] = built.sizes
        for piece, start in self.source.elements(tensor, box):
            crc = isal_zlib.crc32(piece)
            if start is not None:
                self.source.saw(tensor.storage.key, start, len(piece), crc)
            record.write_storage(key, piece, crc)
            self.done += len(piece)
            if self.progress is not None:
                self.progress(self.done, self.total)
        record.finish()


def _object(stream: Stream, leaf: Leaf, storages: Mapping[str, memoryview]) -> None:
    sizes = [(key, len(content)) for key, content in storages.items()]
    record = TorchFileWriter(stream, write(leaf.value), sizes)
    for key, content in storages.items():
        record.write_storage(key, content)
    record.finish()
