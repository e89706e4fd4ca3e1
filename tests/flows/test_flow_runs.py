"""Runs that are such in name only, on a real Prefect API."""

import uuid

import pytest
from prefect import flow, get_client
from prefect.client.schemas.objects import StateType
from prefect.runtime import flow_run
from prefect.states import Running

from flows.flow_runs import end_orphans

pytestmark = pytest.mark.usefixtures("prefect_api")


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
