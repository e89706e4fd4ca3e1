"""The gloo engine: N real processes, a real process group, torch's unmodified ``load``.

It shows that nothing in the simulated engine hides a difference, at the price of N processes and of the
whole model in memory. Objects are scanned here first, and only those that ``weights_only`` takes are given
to the ranks. The first rank that fails ends them all, and what it failed with is what is reported.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import psutil

import dcp
from dcp.archive import Archive
from dcp.checkpoint import Checkpoint
from dcp.dtypes import ITEMSIZE
from dcp.errors import CheckpointError, EnvironmentFault, ResourceError, UsageError
from dcp.findings import Finding, has_errors
from dcp.index import CheckpointIndex
from dcp.layout import Layout
from dcp.load.batches import bytes_of
from dcp.load.gloo_rank import Job, RankResult
from dcp.load.metadata import known_to_torch
from dcp.load.needs import ObjectNeed
from dcp.load.objects import NOTHING, examine
from dcp.load.preflight import preflight
from dcp.load.pull import Pull
from dcp.load.report import LayoutReport, Reader
from dcp.pickles.scan import Allowance

_PROCESS = 400 << 20
"""Bytes a rank takes beside its tensors: torch itself, and what is read ahead."""
_LAST_WORDS = 2.0
"""Seconds that other ranks may still speak once one has failed: theirs may be the better reason."""
_EXPLANATION = 60.0
"""Seconds to wait for the rank on which it began, as the others tell: it may still look for the cause."""


def load_gloo(
    checkpoint: Checkpoint,
    layouts: Sequence[Layout],
    *,
    timeout: float,
    reader: Reader = "bucket",
    allow: Allowance = NOTHING,
    copied: bool = False,
) -> list[LayoutReport]:
    """Load a checkpoint in every layout, one after the other; one report each, in order.

    Args:
        timeout: seconds a layout's load may take before its ranks are killed.
        reader: what the ranks read with: ours, or torch's `FileSystemReader` (local paths only).
        allow: classes that objects may ask for beyond the built-in lists.
        copied: data files may be newer than the index.

    Raises:
        ResourceError: there is not the memory for it.
        EnvironmentFault: storage failed, a rank was killed, or the time was up.
        UsageError: the options of the store cannot be handed to another process.
    """
    index, findings = known_to_torch(*preflight(checkpoint, copied=copied))
    objects, scanned, unsafe = _scan(checkpoint, index, allow)
    known = {(found.code, found.file) for found in findings}
    findings += [found for found in unsafe if (found.code, found.file) not in known]
    return [
        _load(checkpoint, layout, index, objects, scanned, findings, timeout, reader) for layout in layouts
    ]


def _load(
    checkpoint: Checkpoint,
    layout: Layout,
    index: CheckpointIndex,
    objects: list[str],
    scanned: int,
    findings: Sequence[Finding],
    timeout: float,
    reader: Reader,
) -> LayoutReport:
    started = time.perf_counter()
    _require_memory(index, layout)
    results = _run_ranks(checkpoint, layout, index, objects, timeout, reader)
    faults = [result for result in results if result.environment is not None]
    direct = [result for result in results if result.failed and not result.indirect]
    if faults and not any(result.findings for result in direct):
        cause = next((result for result in direct if result.environment is not None), faults[0])
        raise EnvironmentFault(f"{layout}: {cause.environment}")
    # What names a key comes before what a reader said that knows of none.
    found = [*findings, *sorted(_distinct(results), key=lambda each: each.key is None)]
    return LayoutReport(
        layout=str(layout),
        ranks=layout.ranks,
        ok=not has_errors(found) and len(results) == layout.ranks,
        bytes_needed=bytes_of(index),
        bytes_read=sum(result.bytes_read for result in results),
        requests=sum(result.requests for result in results),
        rank_bytes=[result.bytes_loaded for result in results],
        rank_read=[result.bytes_read for result in results],
        rank_requests=[result.requests for result in results],
        rank_seconds=[result.seconds for result in results],
        tensors=len(index.tensors),
        objects=len(objects),
        objects_scanned=scanned,
        seconds=round(time.perf_counter() - started, 6),
        findings=found,
    )


def _scan(
    checkpoint: Checkpoint, index: CheckpointIndex, allow: Allowance
) -> tuple[list[str], int, list[Finding]]:
    """Keys of the objects to be loaded, how many more are harmless, and what is wrong with the others."""
    keys: list[str] = []
    harmless = 0
    findings: list[Finding] = []
    for [need], [got] in Pull(checkpoint).groups([ObjectNeed(entry)] for entry in index.objects):
        assert isinstance(need, ObjectNeed)
        if isinstance(got, CheckpointError):
            findings.append(got.as_finding())
            continue
        assert isinstance(got, Archive)
        found, plain = examine(need.entry, got, allow)
        if found is not None:
            findings.append(found)
        elif plain:
            keys.append(need.entry.key)
        else:
            harmless += 1
    return keys, harmless, findings


def _require_memory(index: CheckpointIndex, layout: Layout) -> None:
    needed = layout.ranks * _PROCESS
    for entry in index.tensors:
        needed += sum(box.volume for box in layout.boxes(entry.shape, entry.key)) * ITEMSIZE[entry.dtype]
    free = psutil.virtual_memory().available
    if needed > free:
        raise ResourceError(
            f"loading as {layout} in {layout.ranks} processes takes about {needed} bytes of memory, "
            f"{free} are free; the simulated engine keeps to its memory budget"
        )


def _distinct(results: Sequence[RankResult]) -> list[Finding]:
    """Findings of all ranks; what all were told of one failure comes once."""
    kept: dict[str, Finding] = {}
    for result in results:
        for found in result.findings:
            kept.setdefault(found.model_dump_json(), found)
    return list(kept.values())


def _run_ranks(
    checkpoint: Checkpoint,
    layout: Layout,
    index: CheckpointIndex,
    objects: list[str],
    timeout: float,
    reader: Reader,
) -> list[RankResult]:
    """Results in rank order: of all ranks, or of those that told why the load failed."""
    loaded = {entry.key for entry in index.tensors}
    skip = [entry.key for entry in checkpoint.index.tensors if entry.key not in loaded]
    try:
        json.dumps(dict(checkpoint.store.options))
    except TypeError as error:
        raise UsageError(
            f"the gloo engine hands storage options to other processes, which these cannot be: {error}"
        ) from None
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckpt-gloo-")))
        ranks = [
            stack.enter_context(
                _Rank(
                    Job(
                        url=checkpoint.url,
                        options=dict(checkpoint.store.options),
                        reader=reader,
                        layout=str(layout),
                        tp_rules=layout.rules.as_mapping() if layout.rules else None,
                        rank=rank,
                        rendezvous=(directory / "rendezvous").as_uri(),
                        timeout=timeout,
                        skip=skip,
                        objects=objects,
                    ),
                    directory / f"rank-{rank}.log",
                    _environment(layout.ranks),
                )
            )
            for rank in range(layout.ranks)
        ]
        return _collect(ranks, layout, timeout)


def _environment(ranks: int) -> dict[str, str]:
    package = str(Path(dcp.__file__).parents[1])
    inherited = os.environ.get("PYTHONPATH")
    return {
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        **os.environ,
        "PYTHONPATH": os.pathsep.join([package, inherited] if inherited else [package]),
    }


class _Rank:
    """A rank's process. Leaving the block kills it if it is still there."""

    def __init__(self, job: Job, log: Path, environment: Mapping[str, str]) -> None:
        self.number = job.rank
        self.log = log
        order = log.with_suffix(".json")
        order.write_text(job.model_dump_json())
        with log.open("wb") as errors:
            # Standard input carries nothing; that it ends tells the rank that this process is gone.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dcp.load.gloo_start", str(order)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(environment),
            )

    def __enter__(self) -> _Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    @property
    def output(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def death(self) -> str:
        """Why the process ended without a result."""
        code = self.process.wait()
        if code < 0:
            reason = f"was killed by signal {-code}"
            return f"{reason}, most likely for want of memory" if code == -9 else reason
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"ended with {code}: {lines[-1] if lines else 'no message'}"


def _collect(ranks: Sequence[_Rank], layout: Layout, timeout: float) -> list[RankResult]:
    """Wait for all ranks, or for the first failure and what the others have to say of it."""
    deadline = limit = time.monotonic() + timeout
    texts: dict[int, bytearray] = {rank.number: bytearray() for rank in ranks}
    results: dict[int, RankResult] = {}
    failed = False
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.output, selectors.EVENT_READ, rank)
        while selector.get_map() and (ready := selector.select(max(0.0, deadline - time.monotonic()))):
            for key, _ in ready:
                rank = key.data
                data = os.read(key.fd, 1 << 16)
                texts[rank.number] += data
                if data:
                    continue
                selector.unregister(key.fileobj)
                try:
                    result = RankResult.model_validate_json(bytes(texts[rank.number]))
                except ValueError:
                    # It ended before it had said anything, or all of it.
                    raise EnvironmentFault(f"{layout}: rank {rank.number} {rank.death()}") from None
                results[rank.number] = result
                if result.failed:
                    first = not failed or result.rank == rank.number
                    failed = True
                    wait = _LAST_WORDS if result.rank in results else _EXPLANATION
                    deadline = min(limit, time.monotonic() + wait) if first else deadline
    late = [str(rank.number) for rank in ranks if rank.number not in results]
    if late and not failed:
        raise EnvironmentFault(
            f"{layout}: rank {', '.join(late)} did not finish within {timeout:g} s and was killed"
        )
    return [results[number] for number in sorted(results)]
