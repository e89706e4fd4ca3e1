"""Runs of deployments, as whoever starts one and waits for it needs them.

A run is started under an idempotency key: whoever asks again under the same key gets the run that there is,
with the parameters it was given then. So a key must hold everything that makes two runs different.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal, cast
from uuid import UUID

from httpx import HTTPError
from prefect import get_client, tags
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterName,
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Cancelled, Cancelling, Crashed

from dcp.errors import EnvironmentFault
from dcp.processes import Process
from flows.prefect_faults import prefect_answers
from flows.prefect_server import start_server

UNFINISHED = [
    StateType.SCHEDULED,
    StateType.PENDING,
    StateType.RUNNING,
    StateType.PAUSED,
    StateType.CANCELLING,
]

_KILLED = re.compile(r"status code:? (?:137|-9|247)\b|OOMKilled|out.of.memory", re.IGNORECASE)
_PROCESS = "process:"
_PROCESS_TAG = re.compile(_PROCESS + r"(?P<machine>[0-9a-f]{8}):(?P<pid>\d+):(?P<started>-?\d+)")
_PAGE = 200
_PATIENCE = 300.0
"""Seconds for which Prefect's API may not answer while a run is waited for."""

BEFORE_LEASE = 120.0
"""Seconds from the beginning of a run until it must show signs of life."""
LOOK = 30.0
"""Seconds between two looks for them; a run that shows none twice is lost."""

Waited = Literal["ended", "never-begun", "too-long", "lost"]
"""How waiting for a run came to an end."""


def start_run(
    deployment: str,
    *,
    key: str,
    parameters: Mapping[str, Any],
    name: str,
    tags: Iterable[str] = (),
    job_variables: Mapping[str, Any] | None = None,
    child: bool,
) -> FlowRun:
    """Start a run of ``flow/deployment``, or find the one that has the idempotency key ``key``.

    Args:
        child: show it within the flow run that starts it.

    Raises:
        EnvironmentFault: there is no such deployment.
    """
    try:
        run = run_deployment(
            deployment,
            parameters=dict(parameters),
            timeout=0,
            idempotency_key=key,
            flow_run_name=name,
            tags=list(tags),
            job_variables=dict(job_variables) if job_variables else None,
            as_subflow=child,
        )
    except ObjectNotFound:
        raise EnvironmentFault(
            f"there is no deployment {deployment} on Prefect's server; see deployments/README.md"
        ) from None
    # Outside of an event loop it is no coroutine.
    return cast(FlowRun, run)


def wait_for(
    run: FlowRun, *, pickup_timeout: float, run_timeout: float, poll: float, alive: Callable[[], bool]
) -> tuple[FlowRun, Waited]:
    """Wait until a run has ended, or is ended here because it was not begun, takes too long or is lost.

    Args:
        run: the run.
        pickup_timeout: seconds in which a worker must begin it.
        run_timeout: seconds that it may take from then on.
        poll: seconds between two looks.
        alive: whether a run that has begun a while ago shows signs of life, or nothing is known of that.

    Raises:
        EnvironmentFault: Prefect's API stopped answering.
    """
    asked = answered = time.monotonic()
    begun: float | None = None
    looked, missed = asked, 0
    with get_client(sync_client=True) as client:
        while True:
            now = time.monotonic()
            try:
                run = client.read_flow_run(run.id)
                answered = now
            except HTTPError as error:
                if now - answered > _PATIENCE:
                    raise EnvironmentFault(f"Prefect's API does not answer ({error})") from None
            state = run.state
            if state is not None and state.is_final():
                return run, "ended"
            if begun is None and state is not None and not (state.is_scheduled() or state.is_pending()):
                begun = now
            if begun is None and now - asked > pickup_timeout:
                _cancel(client, run)
                return run, "never-begun"
            if begun is not None and now - begun > run_timeout:
                _cancel(client, run)
                return run, "too-long"
            if begun is not None and now - begun > BEFORE_LEASE and now - looked > LOOK:
                looked, missed = now, 0 if alive() else missed + 1
                if missed == 2:
                    return declare_crashed(run, "its worker shows no sign of life"), "lost"
            time.sleep(poll)


def own_pool() -> str | None:
    """The work pool whose worker runs this process; None if it was started otherwise."""
    root = flow_run.root_flow_run_id
    if not root:
        return None
    with get_client(sync_client=True) as client:
        return client.read_flow_run(UUID(root)).work_pool_name


def unfinished_keys(flow: str, deployment: str, most: int) -> set[str]:
    """Idempotency keys of the runs of a deployment that have not ended; at least ``most``, if there are."""
    found: set[str] = set()
    with get_client(sync_client=True) as client:
        for offset in range(0, most, _PAGE):
            page = client.read_flow_runs(
                flow_filter=FlowFilter(name=FlowFilterName(any_=[flow])),
                deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=[deployment])),
                flow_run_filter=FlowRunFilter(
                    state=FlowRunFilterState(type=FlowRunFilterStateType(any_=UNFINISHED))
                ),
                sort=FlowRunSort.EXPECTED_START_TIME_ASC,
                limit=_PAGE,
                offset=offset,
            )
            found |= {run.idempotency_key or str(run.id) for run in page}
            if len(page) < _PAGE:
                break
    return found


@contextmanager
def prefect_here() -> Iterator[None]:
    """Prefect for flow runs in this process; each has a tag that says which that is, for `end_orphans`.

    Raises:
        EnvironmentFault: Prefect does not work.
    """
    process = Process.current()
    with prefect_answers():
        start_server()
        with tags(f"{_PROCESS}{process.machine}:{process.pid}:{process.started}"):
            yield


def end_orphans(*flows: str) -> list[str]:
    """End the runs of these flows that nobody executes any more. Their names.

    Of a process that is killed Prefect ends the run that a worker started, and no other: neither those within
    it nor any where there is no worker.
    """
    ended = []
    with get_client(sync_client=True) as client:
        running = client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=list(flows))),
            flow_run_filter=FlowRunFilter(
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING])),
                deployment_id=FlowRunFilterDeploymentId(is_null_=True),
            ),
            limit=_PAGE,
        )
        for run in running:
            # Somebody may have deleted it, or what it was part of.
            with suppress(ObjectNotFound):
                why = _why_orphaned(client, run)
                # A process that has ended may have come to the end of its run since that was listed.
                if why is not None and client.read_flow_run(run.id).state_type is StateType.RUNNING:
                    client.set_flow_run_state(run.id, Crashed(message=why), force=True)
                    ended.append(run.name)
    return ended


def _why_orphaned(client: SyncPrefectClient, run: FlowRun) -> str | None:
    for tag in run.tags:
        found = _PROCESS_TAG.fullmatch(tag)
        if found and Process(found["machine"], int(found["pid"]), int(found["started"])).ended_here:
            return "the process that executed it has ended"
    if run.parent_task_run_id is None:
        return None
    parent = client.read_task_run(run.parent_task_run_id).flow_run_id
    state = client.read_flow_run(parent).state if parent else None
    return "the run that it was part of has ended" if state is not None and state.is_final() else None


def declare_crashed(run: FlowRun, why: str) -> FlowRun:
    """Have a run that is one in name only ended on the server too."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, Crashed(message=why), force=True)
        return client.read_flow_run(run.id)


def killed_for_memory(run: FlowRun) -> bool:
    """Whether a run's process was killed as the kernel, a container or the guard does it for its memory."""
    return _KILLED.search(state_text(run)) is not None


def state_text(run: FlowRun) -> str:
    """How a run ended, in one line."""
    if run.state is None:
        return "unknown"
    message = " ".join((run.state.message or "").split())
    return f"{run.state.name}: {message}" if message else str(run.state.name)


def _cancel(client: SyncPrefectClient, run: FlowRun) -> None:
    """Cancel a run; its worker ends one that is at work."""
    waiting = run.state is None or run.state.is_scheduled() or run.state.is_pending()
    state: State[Any] = Cancelled() if waiting else Cancelling()
    client.set_flow_run_state(run.id, state, force=waiting)
