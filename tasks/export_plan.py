"""What the export of a step will take, from its index alone: all its artifacts, made one after another.

How long it takes is estimated from what the exports of the step published last were measured to take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dcp.errors import CheckpointError, EnvironmentFault, StorageError
from dcp.findings import Report
from tasks.aliases import current_alias
from tasks.export import ExportRequest, single_exports
from tasks.ledger import Ledger, StepKey
from tasks.manifest import published_directory, read_manifest
from tasks.outcomes import boundary

Rates = Mapping[str, float]
"""Bytes a second that were read for an artifact, by its name."""


class StepNeed(Report):
    """What an export takes at most."""

    memory: int
    """Bytes held at the peak, by the export alone."""
    disk: int
    """Bytes of local disk filled; 0 where the artifacts go to a bucket."""
    bytes: int
    """Bytes read."""
    seconds: float
    measured: bool = False
    """Whether the rates behind ``seconds`` were all measured, and not guessed."""


def measured_rates(ledger: Ledger) -> Rates:
    """What the exports of the step that ``latest`` leads to were measured to read.

    Empty before anything is published, and where the manifest cannot be had: an estimate is worth no failure.
    """
    try:
        latest = current_alias(ledger.run_store)
        if latest is None:
            return {}
        key = StepKey(latest.step, latest.fingerprint)
        manifest = read_manifest(ledger.run_store.child(published_directory(key)))
    except (StorageError, EnvironmentFault, CheckpointError):
        return {}
    artifacts = manifest.artifacts if manifest is not None else []
    return {a.name: a.bytes_read / a.seconds for a in artifacts if a.bytes_read and a.seconds}


@boundary
def plan_step(
    url: str,
    destination: str,
    *,
    parts: Sequence[str],
    requests: Sequence[ExportRequest],
    options: Mapping[str, Any],
    publish_options: Mapping[str, Any],
    rates: Rates | None = None,
) -> StepNeed:
    """What `tasks.export.export_step` would take; arguments and errors as there, nothing is written.

    Args:
        rates: from `measured_rates`.
    """
    from dcp.exporting import plan_export

    need = StepNeed(memory=0, disk=0, bytes=0, seconds=0.0, measured=True)
    for one in single_exports(url, destination, parts=parts, requests=requests):
        plan = plan_export(
            one.source,
            one.dest,
            rate=(rates or {}).get(one.name),
            dest_options=dict(publish_options),
            **one.request.arguments(),
            **options,
        )
        need.memory = max(need.memory, plan.memory)
        need.disk += 0 if "://" in plan.dest else plan.disk
        need.bytes += plan.bytes
        need.measured = need.measured and plan.rate_measured
        need.seconds = round(need.seconds + plan.seconds, 1)
    return need
