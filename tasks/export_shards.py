"""One safetensors artifact whose shards are written by whoever a `MapShards` finds to write them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from dcp.exporting.report import ExportReport
from dcp.exporting.shards import (
    ShardedExport,
    ShardPlan,
    WrittenShard,
    claimed_shards,
    discard_shards,
    finish_shards,
    plan_shards,
    write_shard,
)


class ShardWriter:
    """Writes the shard of a number. It can be sent to another process, and called twice.

    A plain object and no dataclass: task runners walk through those in search of other tasks' results.
    """

    def __init__(self, export: ShardedExport, plan: ShardPlan) -> None:
        self.export = export
        self.plan = plan

    def __call__(self, number: int) -> WrittenShard:
        return write_shard(self.export, self.plan, number)


MapShards = Callable[[ShardWriter, int], list[WrittenShard]]
"""Calls the writer with every number below the second argument, in any order and place."""


def export_in_shards(
    url: str,
    dest: str,
    arguments: Mapping[str, Any],
    mapped: MapShards,
    *,
    options: Mapping[str, Any],
    dest_options: Mapping[str, Any],
) -> ExportReport:
    """Export to a directory of shards.

    Args:
        url: the checkpoint.
        dest: the directory.
        arguments: what `dcp.exporting.export` is called with, apart from places.
        mapped: has the shards written.
        options, dest_options: fsspec options of source and destination.

    Raises:
        CkptError: as `dcp.exporting.export`; no index stands, and none of the shards.
    """
    started = time.perf_counter()
    chosen = {name: value for name, value in arguments.items() if name not in ("format", "allow_pickle")}
    export = ShardedExport(url=url, dest=dest, options=options, dest_options=dest_options, **chosen)
    with claimed_shards(export) as held:
        plan = plan_shards(export)
        try:
            written = mapped(ShardWriter(export, plan), len(plan.shards))
            return finish_shards(export, plan, written, held=held, started=started)
        except BaseException:
            discard_shards(export, plan)
            raise
