"""One rank of a gloo test-load, in a process of its own that `dcp.load.gloo_start` began.

It reads a `Job` from a file, loads through torch's unmodified ``load`` into poisoned DTensors, holds
every element against the checkpoint, and writes a `RankResult` to standard output.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pydantic import Field
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dcp.boxes import Box, check_tiling, intersect
from dcp.checkpoint import Checkpoint, open_checkpoint
from dcp.dtypes import ITEMSIZE
from dcp.errors import CheckpointError, EnvironmentFault
from dcp.findings import Finding, Report, finding
from dcp.index import TensorEntry
from dcp.layout import Layout
from dcp.load.bits import bits_of
from dcp.load.metadata import torch_dtype
from dcp.load.needs import ChunkNeed
from dcp.load.pull import Pull
from dcp.load.ranks import InertPlanner
from dcp.load.reader import BucketReader
from dcp.load.regions import moved, spans, strides
from dcp.load.report import Reader
from dcp.load.requests import GAP, REQUEST
from dcp.load.standin import poisoned
from dcp.load.verdicts import about_region, compare, mismatch
from dcp.records import Records
from dcp.tp_rules import Style, TpRules


class Job(Report):
    """What a rank is to do.

    Attributes:
        options: fsspec options.
        reader: `BucketReader`, or torch's own `FileSystemReader` (local paths only).
        tp_rules: style by glob, see `dcp.tp_rules`.
        rendezvous: URL of a file, not there yet, through which the ranks find each other.
        timeout: seconds a rank waits for the others.
        skip: tensors not to be loaded.
        objects: objects to be loaded, all of which ``weights_only`` takes.
    """

    url: str
    options: dict[str, Any]
    reader: Reader
    layout: str
    tp_rules: dict[str, Style] | None
    rank: int
    rendezvous: str
    timeout: float
    skip: list[str]
    objects: list[str]


class RankResult(Report):
    """How it went.

    Attributes:
        rank: whose result it is; for a failure, the rank on which it began.
        seconds: duration of torch's ``load`` alone.
        bytes_loaded: bytes of tensors in this rank's memory.
        bytes_read: bytes read from storage by ``load``.
        requests: ranges read by it; 0 where torch's reader does not tell.
        environment: what failed that says nothing of the checkpoint, if anything.
        indirect: whether that may be no more than the consequence of another rank's end.
        findings: what is wrong with the checkpoint.
    """

    rank: int
    seconds: float = 0.0
    bytes_loaded: int = 0
    bytes_read: int = 0
    requests: int = 0
    environment: str | None = None
    indirect: bool = False
    findings: list[Finding] = Field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether the load did not come to its end."""
        return not self.seconds


def main() -> None:
    """Run the job that the file named on the command line describes."""
    # Whatever prints must not come between the result and its reader.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = Job.model_validate_json(Path(sys.argv[1]).read_text())
    try:
        result = _run(job)
    except BaseException as error:  # torch's CheckpointException is no Exception
        result = result_of(error, job.rank)
        if result.rank == job.rank and any(found.key is None for found in result.findings):
            result = explained(result, job)
    out.write(result.model_dump_json())
    out.close()
    # Other ranks may be gone: nothing is torn down that would wait for them.
    os._exit(0)


def result_of(error: BaseException, rank: int) -> RankResult:
    """The result that a failure is, led back to the rank and the error it began with."""
    within_load = isinstance(error, CheckpointException) and bool(error.failures)
    if isinstance(error, CheckpointException) and error.failures:
        rank = min(error.failures)
        error = error.failures[rank][0]
    if isinstance(error, EnvironmentFault | MemoryError):
        return RankResult(rank=rank, environment=f"rank {rank}: {error}")
    if isinstance(error, CheckpointError):
        return RankResult(rank=rank, findings=[_on_rank(error, rank)])
    why = f"rank {rank}: torch's load failed: {type(error).__name__}: {error}".strip()
    if within_load:
        return RankResult(rank=rank, findings=[finding("records.undecodable", why, rank=rank)])
    return RankResult(rank=rank, environment=why, indirect=True)


def explained(result: RankResult, job: Job) -> RankResult:
    """A failure of a reader that does not say of which key and file, with those that can be found.

    Every record that the rank was to load from is read again, whole, by ours, which tells.
    """
    layout = _layout(job)
    checkpoint = open_checkpoint(job.url, **job.options)
    records = Records(checkpoint.store, checkpoint.objects)
    reads: list[Callable[[], object]] = []
    for entry in checkpoint.index.tensors:
        if entry.key not in job.skip:
            held = layout.boxes(entry.shape, entry.key)[job.rank]
            met = (chunk for chunk in entry.chunks if intersect(chunk.box, held))
            reads += [partial(records.read_chunk, entry, chunk) for chunk in met]
    reads += [partial(records.read_object, e) for e in checkpoint.index.objects if e.key in job.objects]
    causes: list[Finding] = []
    for read in reads:
        try:
            read()
        except CheckpointError as error:
            causes.append(_on_rank(error, job.rank))
    return result.model_copy(update={"findings": [*causes, *result.findings]})


def _on_rank(error: CheckpointError, rank: int) -> Finding:
    found = error.as_finding()
    return found.model_copy(update={"severity": "error", "detail": {**found.detail, "rank": rank}})


def _layout(job: Job) -> Layout:
    return Layout.parse(job.layout, None if job.tp_rules is None else TpRules.of(job.tp_rules))


def _run(job: Job) -> RankResult:
    layout = _layout(job)
    dist.init_process_group(
        "gloo",
        init_method=job.rendezvous,
        rank=job.rank,
        world_size=layout.ranks,
        timeout=timedelta(seconds=job.timeout),
    )
    mesh = init_device_mesh("cpu", tuple(size for _, size in layout.axes))
    checkpoint = open_checkpoint(job.url, **job.options)
    entries = [entry for entry in checkpoint.index.tensors if entry.key not in job.skip]
    held = {entry.key: layout.boxes(entry.shape, entry.key)[job.rank] for entry in entries}
    memory = {e.key: poisoned(held[e.key].sizes, torch_dtype(e)) for e in entries}
    state: dict[str, Any] = {e.key: _sharded(e, memory[e.key], layout, mesh) for e in entries}
    state.update(dict.fromkeys(job.objects))
    reader = _reader(job)
    before = _bytes_read()
    started = time.perf_counter()
    load(state, storage_reader=reader, planner=InertPlanner())
    seconds = time.perf_counter() - started
    if isinstance(reader, BucketReader):
        read, requests = reader.bytes_read, reader.requests
    else:
        read, requests = _bytes_read() - before, 0
    return RankResult(
        rank=job.rank,
        seconds=round(seconds, 6),
        bytes_loaded=sum(tensor.nbytes for tensor in memory.values()),
        bytes_read=read,
        requests=requests,
        findings=[
            *(f for entry in entries for f in _coverage(entry, layout, job.rank, held[entry.key])),
            *_differences(checkpoint, entries, layout, job.rank, memory),
        ],
    )


def _sharded(entry: TensorEntry, local: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
    dims = layout.shard_dims(entry.shape, entry.key)
    placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in dims]
    factor = layout.split_factor(entry.shape, entry.key)
    if factor > 1:
        # What ``fully_shard`` makes of a parameter that ``parallelize_module`` has sharded already.
        placements[0] = _StridedShard(0, split_factor=factor)
    shape, stride = torch.Size(entry.shape), strides(entry.shape)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _reader(job: Job) -> BucketReader | FileSystemReader:
    if job.reader == "torch":
        return FileSystemReader(job.url)
    # What is torn was found before the ranks were started, and is to be seen to fail where it is read.
    return BucketReader(job.url, allow_torn=True, **job.options)


def _bytes_read() -> int:
    """Bytes this process has read from files so far, as Linux counts them."""
    return int(Path("/proc/self/io").read_text().split()[1])


def _coverage(entry: TensorEntry, layout: Layout, rank: int, held: Box) -> Iterator[Finding]:
    """What of a rank's shard no chunk fills, and what two fill."""
    regions = [common for chunk in entry.chunks if (common := intersect(chunk.box, held))]
    tiling = check_tiling(held.sizes, [region.shifted(held.offsets) for region in regions])
    for gap in tiling.gaps:
        region = moved(gap, held.offsets)
        yield about_region("tiling.gap", "no read filled", entry, layout, rank, region)
    for first, second, common in tiling.overlaps:
        region = moved(common, held.offsets)
        reads = [str(regions[first]), str(regions[second])]
        yield about_region("tiling.overlap", "two reads wrote", entry, layout, rank, region, reads=reads)


def _differences(
    checkpoint: Checkpoint,
    entries: list[TensorEntry],
    layout: Layout,
    rank: int,
    memory: dict[str, torch.Tensor],
) -> Iterator[Finding]:
    """Read again what the rank holds, apart from any plan, and compare."""
    pull = Pull(checkpoint)
    needs = [need for entry in entries for need in _needs(entry, layout.boxes(entry.shape, entry.key)[rank])]
    pull.locate(needs)
    for [need], [got] in pull.groups([need] for need in needs):
        assert isinstance(need, ChunkNeed)
        entry = need.entry
        if isinstance(got, CheckpointError):
            yield _on_rank(got, rank)
            continue
        assert isinstance(got, np.ndarray)
        region = moved(need.span.box, need.chunk.box.offsets)
        held = layout.boxes(entry.shape, entry.key)[rank]
        found = compare(bits_of(memory[entry.key]), held, got, region)
        if found is not None:
            yield mismatch(entry, layout, rank, *found)


def _needs(entry: TensorEntry, held: Box) -> Iterator[ChunkNeed]:
    for chunk in entry.chunks:
        common = intersect(chunk.box, held)
        if common is not None:
            local = common.shifted(chunk.box.offsets)
            for span in spans(local, chunk.box.sizes, ITEMSIZE[entry.dtype], gap=GAP, limit=REQUEST):
                yield ChunkNeed(entry, chunk, span)
