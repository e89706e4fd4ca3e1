"""Hands due steps to runs of the deployment `process-checkpoint`, on any number of workers.

`Submitter` stands in for processing a step in the watcher's own process. A step at rest has one run at a
time: its idempotency key holds the step's listing and how many attempts have failed, so two watchers ask for
the same run. A run that was killed leaves nothing in the ledger; the failed attempt is then recorded here, so
that a step that kills its workers is told like any other that fails. At most `max_runs` are unfinished.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta

from prefect.client.schemas.objects import FlowRun

from dcp.checkpoint import Survey, survey
from dcp.errors import NotFoundError
from dcp.sizes import human_bytes
from dcp.storage import join_url
from flows.flow_runs import declare_crashed, killed_for_memory, start_run, state_text, unfinished_keys
from flows.settings import LifecycleSettings, RunSettings
from flows.workshop import StepGoneError, StepReport
from tasks.discover import compile_pattern, provisional_key, step_number
from tasks.leases import touch
from tasks.ledger import DONE, Failure, Ledger, failures

FLOW = "process-checkpoint"

_BEFORE_LEASE = 120.0
"""Seconds from the beginning of a run to its lease on the step."""


class Submitter:
    """The `Processor` that starts runs. One is good for one pass."""

    def __init__(self, settings: LifecycleSettings) -> None:
        self.most = settings.deploy.max_runs
        self._pools = settings.deploy.pools
        self._expiry = settings.lease_expiry + _BEFORE_LEASE
        self._unfinished: set[str] | None = None
        self._writable: set[str] = set()

    def __call__(self, run: RunSettings, step: str) -> StepReport:
        """Start the run of a step, or say which one there is.

        Raises:
            StepGoneError: the step is not in the source any more.
            EnvironmentFault: storage or Prefect failed.
        """
        url = join_url(run.source, step)
        if self._unfinished is None:
            self._unfinished = unfinished_keys(FLOW, FLOW, self.most)
        if len(self._unfinished) >= self.most:
            return _queued(run, step, url, f"waits: {len(self._unfinished)} runs of {FLOW} are unfinished")
        try:
            found = survey(url, **run.options)
        except NotFoundError as error:
            raise StepGoneError(str(error), url) from None
        ledger = Ledger.open(run.publish, run.name, **run.publish_options)
        self._require_writable(ledger, run.name)
        flow_run = self._run_of(ledger, run, step, found)
        self._unfinished.add(flow_run.idempotency_key or str(flow_run.id))
        return _queued(run, step, url, f"flow run {flow_run.name} is {state_text(flow_run)}")

    def _require_writable(self, ledger: Ledger, run: str) -> None:
        """Write to a run's ledger once in a pass: the run of a step that cannot would only fail, untold."""
        if run not in self._writable:
            touch(ledger.store)
            self._writable.add(run)

    def _run_of(self, ledger: Ledger, run: RunSettings, step: str, found: Survey) -> FlowRun:
        provisional = provisional_key(step, found)
        key = ledger.find(step, found.listing_identity, provisional) or provisional
        records = ledger.stages(key)
        attempts = len(failures(records))
        idempotency = _idempotency(run, step, found, attempts)
        while True:
            flow_run = start_run(
                f"{FLOW}/{FLOW}",
                key=idempotency,
                parameters={"run": run.name, "step": step},
                name=f"{run.name}-{step}",
                tags=["checkpoint", f"run:{run.name}"],
                child=False,
            )
            state = flow_run.state
            if state is None or not state.is_final():
                if not self._lost(flow_run):
                    return flow_run
                flow_run = declare_crashed(flow_run, "its worker shows no sign of life")
                state = flow_run.state
            if state is None or state.is_crashed() or state.is_cancelled():
                attempts = ledger.fail(key, self._killed(flow_run, records))
                idempotency = _idempotency(run, step, found, attempts)
            else:
                # It ended in order and left the step due: too early to judge, or the environment failed.
                idempotency = f"{idempotency}:{flow_run.id}"

    def _lost(self, flow_run: FlowRun) -> bool:
        """Whether a run is one in name only: nobody who is alive holds the step, or it would not be due."""
        state = flow_run.state
        if state is None or not (state.is_running() or state.is_pending()):
            return False
        return datetime.now(UTC) - state.timestamp > timedelta(seconds=self._expiry)

    def _killed(self, flow_run: FlowRun, records: frozenset[str]) -> Failure:
        """The failed attempt of a run that could not record it itself."""
        stage = next((stage for stage, done in DONE.items() if done not in records), "validate")
        what = f"the flow run {flow_run.name} ({flow_run.id}) "
        if killed_for_memory(flow_run):
            limits = [int(pool.memory) for pool in self._pools if pool.name == flow_run.work_pool_name]
            what += "was killed, most likely for its memory (exit 137)"
            pool = flow_run.work_pool_name
            what += f"; {human_bytes(limits[0])} are allowed on the pool {pool}" if limits else ""
            what += "; raise the pool's memory, or lower the run's memory_budget; it "
        return Failure(
            stage=stage,
            problem=stage,
            final=False,
            message=f"{what}ended as {state_text(flow_run)}",
            error="FlowRunCrashed",
        )


def _idempotency(run: RunSettings, step: str, found: Survey, attempts: int) -> str:
    listing = hashlib.sha256(found.listing_identity.encode()).hexdigest()[:32]
    return f"{FLOW}:{run.publish}:{run.name}:{step}:{listing}:{attempts}"


def _queued(run: RunSettings, step: str, url: str, message: str) -> StepReport:
    patterns = [compile_pattern(pattern) for pattern in run.step_pattern]
    return StepReport(
        run=run.name,
        step=step,
        number=step_number(step, patterns) or 0,
        url=url,
        fingerprint=None,
        outcome="queued",
        message=message,
        stages=[],
        alerts=[],
    )
