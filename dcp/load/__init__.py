"""Loading: a test-load without a cluster, and the storage reader for real ones.

- `dcp.load.reader`: `BucketReader`, for ``torch.distributed.checkpoint.load``.
- `dcp.load.simulated`, `dcp.load.ranks`: N ranks in one process, through torch's own planner.
- `dcp.load.pull`: ranges out of storage, each byte once.
- `dcp.load.regions`, `dcp.load.batches`: which pieces are read and held together.
- `dcp.load.report`: what is reported.

This is the one part of the package that needs torch; nothing else imports it at module level.
"""

# ruff: noqa: PT028 - `test_load` is no test.

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from dcp.checkpoint import open_checkpoint
from dcp.errors import UsageError
from dcp.layout import Layout
from dcp.load.reader import BucketReader
from dcp.load.report import Engine, LayoutReport, TestLoadReport
from dcp.load.simulated import Progress, load_simulated

__all__ = ["BucketReader", "LayoutReport", "TestLoadReport", "test_load"]

DEFAULT_LAYOUTS = ("fsdp=2", "fsdp=3")


def test_load(
    url: str,
    layouts: Sequence[str] = DEFAULT_LAYOUTS,
    *,
    engine: Engine = "simulated",
    memory_budget: int = 1 << 30,
    progress: Progress | None = None,
    **options: Any,
) -> TestLoadReport:
    """Load a checkpoint on ranks of other layouts than it was saved in, and prove what arrived."""
    started = time.perf_counter()
    parsed = [Layout.parse(text) for text in layouts]
    if not parsed:
        raise UsageError("give at least one layout, e.g. fsdp=2")
    checkpoint = open_checkpoint(url, **options)
    reports = load_simulated(checkpoint, parsed, memory_budget, progress)
    return TestLoadReport(
        checkpoint=checkpoint.url,
        engine=engine,
        ok=all(report.ok for report in reports),
        layouts=reports,
        bytes_read=max(report.bytes_read for report in reports),
        seconds=round(time.perf_counter() - started, 6),
    )
