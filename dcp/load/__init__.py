"""Loading: a test-load without a cluster, and the storage reader for real ones.

- `dcp.load.reader`: `BucketReader`, for ``torch.distributed.checkpoint.load``.
- `dcp.load.planners`: `StrictLoadPlanner` to resume, `PartialLoadPlanner` to fine-tune; with
  `dcp.load.rename`, `dcp.load.patterns` (names), `dcp.load.transforms`, `dcp.load.assembly` (what is done to
  tensors on the way in), `dcp.load.matching` (what does not fit), `dcp.load.shards` (what a rank
  holds) and `dcp.load.items` (reads).
- `dcp.load.forecast`, `dcp.load.counting`: what loads would read, from the index alone.
- `dcp.load.simulated`, `dcp.load.ranks`: N ranks in one process, through torch's own planner.
- `dcp.load.gloo`, `dcp.load.gloo_start`, `dcp.load.gloo_rank`: N real processes, through torch's ``load``.
- `dcp.load.pull`: ranges out of storage, each byte once; `dcp.load.requests`: how much at once.
- `dcp.load.regions`, `dcp.load.batches`: which pieces are read and held together.
- `dcp.load.verdicts`: how what was loaded is held against the checkpoint.
- `dcp.load.report`: what is reported.

This is the part of the package that needs torch, but not all of it: forecasts are arithmetic. So torch is
loaded when a load begins, and by the modules above that are named for it, not by this one.
"""

# ruff: noqa: PT028 - `test_load` is no test.

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from dcp.checkpoint import Kind, open_checkpoint, survey
from dcp.collector import gc_paused, gc_settled
from dcp.errors import UsageError
from dcp.index import CheckpointIndex
from dcp.layout import Layout
from dcp.load.report import Engine, LayoutReport, Reader, TestLoadReport
from dcp.pickles.scan import Allowance
from dcp.tp_rules import TpRules

if TYPE_CHECKING:
    from dcp.load.simulated import Progress

__all__ = ["LayoutReport", "TestLoadReport", "test_load"]

LEAST_BUDGET = 1 << 20
"""Smallest memory budget, in bytes."""
TIMEOUT = 600.0
"""Seconds a layout may take with gloo."""
DEFAULT_LAYOUTS = ("fsdp=2", "fsdp=3")


def test_load(
    url: str | PathLike[str],
    layouts: Sequence[str] = DEFAULT_LAYOUTS,
    *,
    engine: Engine = "simulated",
    reader: Reader = "bucket",
    memory_budget: int = 1 << 30,
    timeout: float = TIMEOUT,
    tp_rules: TpRules | Mapping[str, object] | str | None = None,
    allow: Sequence[str] = (),
    copied: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> TestLoadReport:
    """Load a checkpoint on ranks of other layouts than it was saved in, and prove what arrived.

    Args:
        url: the checkpoint, or a step directory whose parts are checkpoints, which are loaded in turn.
        layouts: such as ``"fsdp=2,tp=2"``.
        engine: ``"simulated"``, in this process; or ``"gloo"``, in one process a rank, with the whole model
            in memory.
        reader: what gloo ranks read with: ``"bucket"`` for `dcp.BucketReader`, or ``"torch"`` for torch's own
            reader, which reads local paths alone.
        memory_budget: bytes the simulated engine may hold beside what torch and the index take.
        timeout: seconds a layout may take with gloo.
        tp_rules: what the tp axis shards, as `dcp.tp_rules.TpRules`, as a mapping or as the place of a file.
        allow: classes that objects may ask for beyond the built-in lists (``pkg.mod.Class``, ``pkg.*``).
        copied: this is a copy, so that data files may be newer than the index.
        progress: told of the bytes done and of all, by the simulated engine.
        options: passed to the fsspec filesystem.

    Returns:
        A report that is not ok where anything is wrong with the checkpoint's content.

    Raises:
        UsageError: a layout, a rule, the engine or the budget is not possible, or does not fit a tensor.
        MetadataError, NotLoadableError: there is no index to load by.
        EnvironmentFault: storage or memory failed, which says nothing of the checkpoint.
    """
    started = time.perf_counter()
    rules = TpRules.given(tp_rules)
    parsed = Layout.parse_all(layouts, rules)
    if not parsed:
        raise UsageError("give at least one layout, e.g. fsdp=2")
    if memory_budget < LEAST_BUDGET:
        raise UsageError(f"a memory budget of {memory_budget} bytes is too small; at least {LEAST_BUDGET}")
    if engine not in ("simulated", "gloo"):
        raise UsageError(f"engine {engine!r} is not known; use simulated or gloo")
    if reader not in ("bucket", "torch"):
        raise UsageError(f"reader {reader!r} is not known; use bucket or torch")
    if reader == "torch" and engine != "gloo":
        raise UsageError("the simulated ranks share one reader of their own; reader torch needs engine gloo")
    allowance = Allowance(allow)
    found = survey(url, **options)
    if reader == "torch" and "://" in found.store.url:
        raise UsageError(f"torch's own reader reads local paths alone, and not {found.store.url}")
    parts = (*found.parts, *found.begun) if found.kind is Kind.PARTS else ()
    opened = {name: open_checkpoint(found.part(name)) for name in parts} or {"": open_checkpoint(found)}
    idle = _idle(rules, parsed, [checkpoint.index for checkpoint in opened.values()])
    reports: list[LayoutReport] = []
    read = 0
    for part, checkpoint in opened.items():
        if engine == "gloo":
            from dcp.load.gloo import load_gloo

            loaded = load_gloo(
                checkpoint, parsed, timeout=timeout, reader=reader, allow=allowance, copied=copied
            )
            read += sum(report.bytes_read for report in loaded)
        else:
            # torch makes a million objects when it is imported, and the collector looks through them again
            # and again.
            with gc_paused():
                from dcp.load.simulated import load_simulated

            with gc_settled():
                loaded = load_simulated(
                    checkpoint, parsed, memory_budget, progress, allow=allowance, copied=copied
                )
            read += max(report.bytes_read for report in loaded)
        reports += [_inside(part, report) for report in loaded] if part else loaded
    return TestLoadReport(
        checkpoint=found.store.url,
        engine=engine,
        ok=all(report.ok for report in reports),
        layouts=reports,
        bytes_read=read,
        tp_rules_idle=idle,
        seconds=round(time.perf_counter() - started, 6),
    )


def _idle(rules: TpRules | None, layouts: Sequence[Layout], indices: Sequence[CheckpointIndex]) -> list[str]:
    """Rules that match nothing; not one that matches anything is a mistake that would prove nothing."""
    if rules is None:
        return []
    if all(layout.tp is None for layout in layouts):
        raise UsageError("tp rules were given, but no layout has a tp axis; give one such as tp=2")
    keys = [entry.key for index in indices for entry in index.tensors]
    idle = rules.idle(keys)
    if keys and len(idle) == len(rules.rules):
        raise UsageError(
            f"no tp rule matches a tensor of the checkpoint: {', '.join(map(repr, idle[:5]))}; its keys are "
            f"such as {keys[0]}"
        )
    return idle


def _inside(part: str, report: LayoutReport) -> LayoutReport:
    findings = [found.inside(part) for found in report.findings]
    return report.model_copy(update={"part": part, "findings": findings})
