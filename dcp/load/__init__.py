"""Loading: a test-load without a cluster, and the storage reader for real ones.

- `dcp.load.reader`: `BucketReader`, for ``torch.distributed.checkpoint.load``.
- `dcp.load.planners`: `StrictLoadPlanner` to resume, `PartialLoadPlanner` to fine-tune; with
  `dcp.load.rename`, `dcp.load.patterns` (names), `dcp.load.transforms`, `dcp.load.assembly` (what is done to
  tensors on the way in), `dcp.load.matching` (what does not fit) and `dcp.load.items` (reads).
- `dcp.load.forecast`, `dcp.load.counting`: what loads would read, from the index alone.
- `dcp.load.simulated`, `dcp.load.ranks`: N ranks in one process, through torch's own planner.
- `dcp.load.gloo`, `dcp.load.gloo_rank`: N real processes, through torch's own ``load``.
- `dcp.load.pull`: ranges out of storage, each byte once.
- `dcp.load.regions`, `dcp.load.batches`: which pieces are read and held together.
- `dcp.load.verdicts`: how what was loaded is held against the checkpoint.
- `dcp.load.report`: what is reported.

This is the one part of the package that needs torch; nothing else imports it at module level.
"""

# ruff: noqa: PT028 - `test_load` is no test.

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from dcp.checkpoint import open_checkpoint
from dcp.collector import gc_paused
from dcp.errors import UsageError
from dcp.layout import Layout

# torch makes a million objects when it is imported, and the collector looks through them again and again.
with gc_paused():
    from dcp.load.reader import BucketReader
    from dcp.load.report import Engine, LayoutReport, TestLoadReport
    from dcp.load.simulated import Progress, load_simulated

__all__ = ["BucketReader", "LayoutReport", "TestLoadReport", "test_load"]

LEAST_BUDGET = 1 << 20
"""Smallest memory budget, in bytes."""
TIMEOUT = 600.0
"""Seconds a layout may take with gloo."""
DEFAULT_LAYOUTS = ("fsdp=2", "fsdp=3")


def test_load(
    url: str,
    layouts: Sequence[str] = DEFAULT_LAYOUTS,
    *,
    engine: Engine = "simulated",
    memory_budget: int = 1 << 30,
    timeout: float = TIMEOUT,
    progress: Progress | None = None,
    **options: Any,
) -> TestLoadReport:
    """Load a checkpoint on ranks of other layouts than it was saved in, and prove what arrived.

    Args:
        url: the checkpoint.
        layouts: such as ``"fsdp=2,tp=2"``.
        engine: ``"simulated"``, in this process; or ``"gloo"``, in one process a rank, with the whole model
            in memory.
        memory_budget: bytes the simulated engine may hold beside what torch and the index take.
        timeout: seconds a layout may take with gloo.
        progress: told of the bytes done and of all, by the simulated engine.
        options: passed to the fsspec filesystem.

    Returns:
        A report that is not ok where anything is wrong with the checkpoint's content.

    Raises:
        UsageError: a layout, the engine or the budget is not possible.
        MetadataError, NotLoadableError: there is no index to load by.
        EnvironmentFault: storage or memory failed, which says nothing of the checkpoint.
    """
    started = time.perf_counter()
    parsed = [Layout.parse(text) for text in layouts]
    if not parsed:
        raise UsageError("give at least one layout, e.g. fsdp=2")
    if memory_budget < LEAST_BUDGET:
        raise UsageError(f"a memory budget of {memory_budget} bytes is too small; at least {LEAST_BUDGET}")
    checkpoint = open_checkpoint(url, **options)
    if engine == "simulated":
        reports = load_simulated(checkpoint, parsed, memory_budget, progress)
        read = max(report.bytes_read for report in reports)
    elif engine == "gloo":
        from dcp.load.gloo import load_gloo

        reports = load_gloo(checkpoint, parsed, timeout=timeout)
        read = sum(report.bytes_read for report in reports)
    else:
        raise UsageError(f"engine {engine!r} is not known; use simulated or gloo")
    return TestLoadReport(
        checkpoint=checkpoint.url,
        engine=engine,
        ok=all(report.ok for report in reports),
        layouts=reports,
        bytes_read=read,
        seconds=round(time.perf_counter() - started, 6),
    )
