"""What the export of a step will take, from its index alone: all its artifacts, made one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dcp.findings import Report
from dcp.storage import join_url
from tasks.export import ExportRequest, parts_of
from tasks.outcomes import boundary


class StepNeed(Report):
    """What an export takes at most."""

    memory: int
    """Bytes held at the peak, by the export alone."""
    disk: int
    """Bytes of local disk filled; 0 where the artifacts go to a bucket."""
    bytes: int
    """Bytes read."""
    seconds: float


@boundary
def plan_step(
    url: str,
    destination: str,
    *,
    parts: Sequence[str],
    requests: Sequence[ExportRequest],
    options: Mapping[str, Any],
    publish_options: Mapping[str, Any],
) -> StepNeed:
    """What `tasks.export.export_step` would take; arguments and errors as there, nothing is written."""
    from dcp.exporting import plan_export

    need = StepNeed(memory=0, disk=0, bytes=0, seconds=0.0)
    for request in requests:
        for part in parts_of(request, parts):
            plan = plan_export(
                join_url(url, part) if part else url,
                join_url(destination, f"{part}/{request.name}" if part else request.name),
                dest_options=dict(publish_options),
                **request.arguments(),
                **options,
            )
            need.memory = max(need.memory, plan.memory)
            need.disk += 0 if "://" in plan.dest else plan.disk
            need.bytes += plan.bytes
            need.seconds = round(need.seconds + plan.seconds, 1)
    return need
