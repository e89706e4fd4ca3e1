"""Exports on workers that are large enough: the parent plans, chooses a pool, starts a run there and waits.

`ExportElsewhere` stands in for `tasks.export.export_step` where pools are configured. The run it starts is
one of `flows.export_step`, unless its own worker belongs to that pool. The two share the ledger, so a parent
that dies and its successor meet the same run again: its key holds the step's bytes, the attempt and what is
asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from prefect.client.schemas.objects import FlowRun
from prefect.logging import get_run_logger

from dcp.errors import EnvironmentFault, NotFoundError, ResourceError, StorageError
from dcp.sizes import human_bytes, human_span
from dcp.storage import join_url, open_store
from flows.deploy_settings import PoolSettings
from flows.flow_runs import Waited, killed_for_memory, own_pool, start_run, state_text, wait_for
from flows.pools import smallest_pool
from flows.settings import LifecycleSettings, RunSettings
from flows.sharding import shard_mapper
from tasks.export import ExportRequest, StepExport, artifacts_stand, export_step
from tasks.export_plan import StepNeed, measured_rates, plan_step
from tasks.handover import artifacts_of, raise_failure
from tasks.leases import Leases
from tasks.ledger import Ledger, StepKey
from tasks.manifest import published_directory
from tasks.prefect_tasks import call_as_task

FLOW = "export-step"
"""Its deployments are named as the pools are."""

POLL = 2.0


def requests_of(run: RunSettings) -> list[ExportRequest]:
    """The artifacts that the settings ask for."""
    return [ExportRequest(**dict(export)) for export in run.exports]


def directory_of(run: RunSettings, key: StepKey) -> str:
    """Where a step of the run is published."""
    return join_url(run.publish, run.name, published_directory(key))


def lease_name(step: str, token: str) -> str:
    """Under which name a worker holds a lease while it exports: only to show that it is alive."""
    return f"{step}@export-{token}"


class ExportElsewhere:
    """Exports steps of one run on the pools of the settings. Must be called from within a flow."""

    def __init__(
        self, settings: LifecycleSettings, run: RunSettings, ledger: Ledger, *, poll: float = POLL
    ) -> None:
        self.settings = settings.deploy
        self.run = run
        self.ledger = ledger
        self.leases = Leases(ledger.store, settings.lease_expiry)
        self.poll = poll

    def __call__(self, key: StepKey, attempt: int, parts: Sequence[str]) -> StepExport:
        """Export a step.

        Args:
            key: its bytes.
            attempt: which attempt at these bytes this is, from 1.
            parts: the checkpoints of the step; empty if it is one itself.

        Raises:
            UsageError: the settings ask for what cannot be done with this step.
            CheckpointError: the step cannot be exported.
            StageFailedError: the export failed elsewhere, and said why.
            ResourceError: no pool is large enough, or the one chosen turned out not to be.
            EnvironmentFault: the run failed, was cancelled, took too long or was never begun.
        """
        run = self.run
        requests = requests_of(run)
        need = plan_step(
            join_url(run.source, key.step),
            directory_of(run, key),
            parts=parts,
            requests=requests,
            options=run.options,
            publish_options=run.publish_options,
            rates=measured_rates(self.ledger),
        )
        need.memory *= self.settings.shards_here
        pool, memory = smallest_pool(self.settings.pools, need, overhead=self.settings.overhead)
        if pool.name == own_pool():
            # This very run may take as much; waiting here for another slot could wait for itself.
            return call_as_task(
                export_step,
                join_url(run.source, key.step),
                directory_of(run, key),
                parts=parts,
                requests=requests,
                options=run.options,
                publish_options=run.publish_options,
                mapped=shard_mapper(self.settings),
            )
        asked = repr((pool.name, memory, list(parts), [asdict(request) for request in requests]))
        token = f"{attempt}-{hashlib.sha256(asked.encode()).hexdigest()[:12]}"
        flow_run = self._started(key, token, parts, pool, memory, need)
        get_run_logger().info(
            "export of %s on the pool %s as %s: %d bytes of memory, about %.0f s",
            key.step,
            pool.name,
            flow_run.name,
            memory,
            need.seconds,
        )
        ended, waited = wait_for(
            flow_run,
            pickup_timeout=self.settings.pickup_timeout,
            run_timeout=self.settings.export_timeout,
            poll=self.poll,
            alive=partial(self._alive, lease_name(key.step, token)),
        )
        raise_failure(self.ledger, key, token)
        if waited == "ended" and ended.state is not None and ended.state.is_completed():
            try:
                return StepExport(artifacts=artifacts_of(self.ledger, key))
            except NotFoundError:
                raise EnvironmentFault(
                    f"the export run {ended.name} completed, but the ledger does not show it; the worker's "
                    f"settings may name another publish root than {run.publish}"
                ) from None
        raise self._fault(ended, waited, pool, memory)

    def _started(
        self,
        key: StepKey,
        token: str,
        parts: Sequence[str],
        pool: PoolSettings,
        memory: int,
        need: StepNeed,
    ) -> FlowRun:
        """The run under this token; a completed one whose files are gone again is followed by another."""
        idempotency = f"{FLOW}:{self.run.name}:{key.step}:{key.fingerprint}:{token}"
        while True:
            flow_run = start_run(
                f"{FLOW}/{pool.name}",
                key=idempotency,
                parameters={
                    "run": self.run.name,
                    "step": key.step,
                    "fingerprint": key.fingerprint,
                    "token": token,
                    "parts": list(parts),
                },
                name=f"{self.run.name}-{key.step}-export-{token.partition('-')[0]}",
                tags=["checkpoint", f"run:{self.run.name}"],
                job_variables={"memory": memory, "disk": need.disk},
                child=True,
            )
            if flow_run.state is None or not flow_run.state.is_completed() or self._stands(key):
                return flow_run
            idempotency = f"{idempotency}:{flow_run.id}"

    def _alive(self, name: str) -> bool:
        """Whether the worker holds its lease; True where storage does not tell."""
        try:
            standing = self.leases.standing(name)
            return standing is not None and not self.leases.dead(standing)
        except StorageError:
            return True

    def _stands(self, key: StepKey) -> bool:
        try:
            artifacts = artifacts_of(self.ledger, key)
        except NotFoundError:
            return True  # nothing was recorded, which is told as such
        return artifacts_stand(open_store(directory_of(self.run, key), **self.run.publish_options), artifacts)

    def _fault(self, run: FlowRun, waited: Waited, pool: PoolSettings, memory: int) -> EnvironmentFault:
        what = f"the export run {run.name} on the pool {pool.name}"
        asked = (
            f"{human_bytes(memory)} of memory were estimated, {human_bytes(pool.memory)} are allowed there"
        )
        if waited == "never-begun":
            return EnvironmentFault(
                f"{what} was begun by no worker within {human_span(self.settings.pickup_timeout)} and is "
                f"cancelled; see its workers: prefect work-pool inspect {pool.name} ({asked})"
            )
        if waited == "lost":
            return EnvironmentFault(f"{what} lost its worker, which shows no sign of life any more ({asked})")
        if waited == "too-long":
            return EnvironmentFault(
                f"{what} took more than {human_span(self.settings.export_timeout)} and is cancelled ({asked})"
            )
        text = state_text(run)
        if killed_for_memory(run):
            return ResourceError(
                f"{what} was killed, most likely for its memory (exit 137): {asked}; raise the pool's memory "
                f"or overhead in [deploy], or lower the export's memory_budget ({text})"
            )
        if run.state is not None and run.state.is_cancelled():
            return EnvironmentFault(f"{what} was cancelled ({asked})")
        return EnvironmentFault(f"{what} failed ({text}; {asked})")
