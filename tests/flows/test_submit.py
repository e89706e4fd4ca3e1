"""Steps as runs of a deployment, on a real Prefect API on which no worker is at work."""

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import get_client
from prefect.client.schemas.objects import FlowRun, State, StateType

from dcp.errors import EnvironmentFault, OutOfSpaceError
from dcp.storage.local import LocalStore
from flows import flow_runs, submit
from flows.process import process_checkpoint
from flows.settings import LifecycleSettings
from flows.submit import FLOW, Submitter
from flows.workshop import StepGoneError, StepReport
from tests.support.harness import PrefectApi
from tests.support.lifecycle import Lifecycle

pytestmark = pytest.mark.usefixtures("prefect_api")


@pytest.fixture
def deployment(prefect_api: PrefectApi) -> Iterator[uuid.UUID]:
    """The deployment, without a schedule and without a worker; its runs go with it."""

    async def make() -> uuid.UUID:
        async with get_client() as client:
            flow = await client.create_flow(process_checkpoint)
            return await client.create_deployment(flow_id=flow, name=FLOW)

    async def drop(made: uuid.UUID) -> None:
        async with get_client() as client:
            for run in await client.read_flow_runs(limit=200):
                if run.deployment_id == made:
                    await client.delete_flow_run(run.id)
            await client.delete_deployment(made)

    assert prefect_api.url
    made = asyncio.run(make())
    yield made
    asyncio.run(drop(made))


@pytest.fixture
def life(tmp_path: Path) -> Lifecycle:
    found = Lifecycle(str(tmp_path / "place"), tmp_path / "settings")
    for number in (1, 2, 3):
        found.save(f"step_{number}")
    return found


def _settings(life: Lifecycle, most: int = 50) -> LifecycleSettings:
    return life.settings(tables=f'[deploy]\nsteps = "runs"\nmax_runs = {most}\n')


def _submit(settings: LifecycleSettings, *steps: str) -> list[StepReport]:
    submitter = Submitter(settings)
    return [submitter(settings.runs[0], step) for step in steps]


def _runs(deployment: uuid.UUID) -> list[FlowRun]:
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(limit=200)
    return sorted((run for run in found if run.deployment_id == deployment), key=lambda run: run.created or 0)


def _end(run: FlowRun, kind: StateType, **state: Any) -> None:
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, State(type=kind, **state), force=True)


def test_one_run_a_step_however_often_it_is_asked_for(life: Lifecycle, deployment: uuid.UUID) -> None:
    settings = _settings(life)
    for _ in range(2):
        reports = _submit(settings, "step_1", "step_2")
        assert [report.outcome for report in reports] == ["queued", "queued"]
        assert reports[0].message.startswith("flow run demo-step_1 is Scheduled")
    runs = _runs(deployment)
    assert sorted(run.name for run in runs) == ["demo-step_1", "demo-step_2"]
    assert {str(run.parameters) for run in runs} == {
        str({"run": "demo", "step": step}) for step in ("step_1", "step_2")
    }


def test_no_run_is_started_where_the_ledger_cannot_be_written(
    life: Lifecycle, deployment: uuid.UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could only fail, in each pass again; the pass itself fails, and people are told if that lasts."""
    settings = _settings(life)

    def full(store: LocalStore, name: str, _: bytes) -> None:
        raise OutOfSpaceError(f"no space for {store.url}/{name}", f"{store.url}/{name}")

    monkeypatch.setattr(LocalStore, "replace", full)
    with pytest.raises(OutOfSpaceError):
        _submit(settings, "step_1")
    assert _runs(deployment) == []


def test_never_more_than_may_be_unfinished(life: Lifecycle, deployment: uuid.UUID) -> None:
    settings = _settings(life, most=2)
    reports = _submit(settings, "step_1", "step_2", "step_3")
    assert reports[2].message == "waits: 2 runs of process-checkpoint are unfinished"
    assert len(_runs(deployment)) == 2
    _end(_runs(deployment)[0], StateType.COMPLETED)
    assert _submit(settings, "step_3")[0].message.startswith("flow run demo-step_3")
    assert len(_runs(deployment)) == 3


def test_a_step_saved_over_gets_another_run(life: Lifecycle, deployment: uuid.UUID) -> None:
    settings = _settings(life)
    _submit(settings, "step_1")
    life.save("step_1", "torch_sharded_tensor_t2.3.1")
    _submit(settings, "step_1")
    assert len(_runs(deployment)) == 2


def test_a_run_that_was_killed_is_a_failed_attempt(life: Lifecycle, deployment: uuid.UUID) -> None:
    settings = _settings(life)
    for attempt in (1, 2):
        _submit(settings, "step_1")
        _end(_runs(deployment)[-1], StateType.CRASHED, message="Process exited with status code: 137.")
        _submit(settings, "step_1")
        [records] = life.records("step_1")
        assert records == {f"failed-{number}" for number in range(1, attempt + 1)}
    [key] = life.ledger.keys("step_1")
    facts = life.ledger.read(key, "failed-1").facts
    assert (facts["stage"], facts["final"]) == ("validate", False)
    assert "most likely for its memory (exit 137)" in facts["message"]
    assert "ended as Crashed: Process exited with status code: 137." in facts["message"]
    assert len(_runs(deployment)) == 3


def test_a_run_that_ended_in_order_and_left_the_step_due_is_followed(
    life: Lifecycle, deployment: uuid.UUID
) -> None:
    settings = _settings(life)
    _submit(settings, "step_1")
    _end(_runs(deployment)[0], StateType.COMPLETED)
    for _ in range(2):
        _submit(settings, "step_1")
    assert len(_runs(deployment)) == 2
    assert life.records("step_1") == []


def test_a_run_whose_worker_is_gone_is_ended(
    life: Lifecycle, deployment: uuid.UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _settings(life)
    _submit(settings, "step_1")
    _end(_runs(deployment)[0], StateType.RUNNING)
    _submit(settings, "step_1")
    assert len(_runs(deployment)) == 1
    # It has been running for longer than that.
    monkeypatch.setattr(submit, "_BEFORE_LEASE", -settings.lease_expiry)
    _submit(settings, "step_1")
    first, second = _runs(deployment)
    assert first.state is not None
    assert first.state.is_crashed()
    assert second.state is not None
    assert second.state.is_scheduled()
    assert life.records("step_1") == [{"failed-1"}]


def test_what_is_not_there_is_said(life: Lifecycle, deployment: uuid.UUID) -> None:
    with pytest.raises(StepGoneError):
        _submit(_settings(life), "step_9")
    assert _runs(deployment) == []


def test_without_its_deployment(life: Lifecycle) -> None:
    with pytest.raises(EnvironmentFault, match="no deployment process-checkpoint/process-checkpoint"):
        _submit(_settings(life), "step_1")


@pytest.mark.usefixtures("deployment")
def test_all_unfinished_runs_are_counted(life: Lifecycle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_runs, "_PAGE", 2)
    _submit(_settings(life), "step_1", "step_2", "step_3")
    assert len(flow_runs.unfinished_keys(FLOW, FLOW, 50)) == 3
