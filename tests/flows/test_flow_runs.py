"""Runs that are such in name only, on a real Prefect API."""

import os
import subprocess
import sys
import uuid

import pytest
from prefect import flow, get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.runtime import flow_run
from prefect.states import Completed, Running

from dcp.errors import EnvironmentFault
from flows.flow_runs import end_orphans
from tasks.prefect_tasks import start_deployment
from tests.support.harness import PrefectApi

pytestmark = pytest.mark.usefixtures("prefect_api")

AT_WORK = """
import sys, time
from prefect import flow
from prefect.runtime import flow_run
from flows.flow_runs import prefect_here

@flow(name=sys.argv[1])
def at_work():
    print(flow_run.id, flush=True)
    time.sleep(600)

with prefect_here():
    at_work()
"""


def test_a_run_within_one_that_has_ended_is_ended_and_no_other() -> None:
    name = f"inner-{uuid.uuid4().hex[:8]}"

    @flow(name=name)
    def inner() -> str:
        return str(flow_run.id)

    @flow
    def outer() -> tuple[str, str]:
        return str(flow_run.id), inner()

    (_, orphan), (going_on, within) = outer(), outer()
    alone = inner()
    with get_client(sync_client=True) as client:
        # As a kill leaves them: nobody told Prefect of the runs within.
        for run in (orphan, within, alone, going_on):
            client.set_flow_run_state(uuid.UUID(run), Running(), force=True)
        ended = end_orphans(name)
        assert ended == [client.read_flow_run(uuid.UUID(orphan)).name]
        assert end_orphans(name) == []
        states = [client.read_flow_run(uuid.UUID(run)).state for run in (orphan, within, alone)]
        assert [state.type for state in states if state] == [
            StateType.CRASHED,
            StateType.RUNNING,
            StateType.RUNNING,
        ]
        for run in (within, alone, going_on):
            client.delete_flow_run(uuid.UUID(run))


def test_a_run_that_ends_or_is_deleted_meanwhile_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"ending-{uuid.uuid4().hex[:8]}"

    @flow(name=name)
    def ending() -> str:
        return str(flow_run.id)

    ends, goes = uuid.UUID(ending()), uuid.UUID(ending())
    with get_client(sync_client=True) as client:
        for run in (ends, goes):
            client.set_flow_run_state(run, Running(), force=True)

        def meanwhile(_: object, run: FlowRun) -> str:
            if run.id == ends:
                client.set_flow_run_state(run.id, Completed(), force=True)
            else:
                client.delete_flow_run(run.id)
            return "its process is gone"

        monkeypatch.setattr("flows.flow_runs._why_orphaned", meanwhile)
        assert end_orphans(name) == []
        assert client.read_flow_run(ends).state_type == StateType.COMPLETED


def test_a_deployment_that_does_not_exist_is_said_to_be_that() -> None:
    with pytest.raises(EnvironmentFault, match="there is no deployment evaluate/nightly on"):
        start_deployment("evaluate/nightly", {}, "once")


def test_a_run_whose_process_was_killed_is_ended_and_not_before(prefect_api: PrefectApi) -> None:
    name = f"at-work-{uuid.uuid4().hex[:8]}"
    process = subprocess.Popen(
        [sys.executable, "-c", AT_WORK, name],
        env={**os.environ, **prefect_api.env, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        run = uuid.UUID(process.stdout.readline().strip())
        assert end_orphans(name) == []
    finally:
        process.kill()
        process.communicate(timeout=60)
    with get_client(sync_client=True) as client:
        assert end_orphans(name) == [client.read_flow_run(run).name]
        assert client.read_flow_run(run).state_type == StateType.CRASHED
