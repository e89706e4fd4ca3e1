"""The Prefect flows on a real Prefect API, with source and publish root in one bucket of the fake GCS."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.passes import PassReport, watch_once
from flows.process import run_step
from flows.watch import watch, watch_in_flow
from tasks.publish import current_alias, verify
from tests.support.harness import PrefectApi
from tests.support.lifecycle import OTHER_KEYS, RUN, Lifecycle, anywhere, outcomes

WORKER = """
import sys
from flows.passes import watch_once
from flows.settings import load_settings
print(watch_once(load_settings(sys.argv[1])).model_dump_json())
"""


@pytest.fixture
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Lifecycle:
    return Lifecycle(anywhere("gs", request, tmp_path), tmp_path / "settings")


@pytest.mark.usefixtures("prefect_api")
def test_the_whole_flow_in_a_bucket(bucket: Lifecycle) -> None:
    settings = bucket.settings(layouts=["fsdp=2", "fsdp=3"], expectation="previous")
    bucket.save("step_1")
    bucket.save("step_2", without=(".metadata",))
    bucket.save("step_3")
    bucket.cut("step_3")
    bucket.save("step_4", OTHER_KEYS)
    bucket.save("step_5")
    report = watch_once(settings)
    assert outcomes(report) == {
        "step_1": "published",
        "step_2": "incomplete",
        "step_3": "torn",
        "step_4": "key-mismatch",
        "step_5": "published",
    }
    for step in report.steps:
        assert [alert.ok for alert in step.alerts] == ([True] if step.problem else [])
        if step.published:
            assert verify(step.published).ok
    alias = current_alias(bucket.published)
    assert alias is not None
    assert alias.step == "step_5"
    names = asyncio.run(_flow_runs())
    assert {f"{RUN}-step_{number}" for number in range(1, 6)} <= names

    events = asyncio.run(_events())
    told = {
        (event, resource)
        for event, resource in events
        if resource.startswith(f"checkpoint.{RUN}.") and event.startswith("checkpoint.")
    }
    assert told >= {
        ("checkpoint.incomplete", f"checkpoint.{RUN}.step_2"),
        ("checkpoint.torn", f"checkpoint.{RUN}.step_3"),
        ("checkpoint.key-mismatch", f"checkpoint.{RUN}.step_4"),
    }
    second = watch_once(settings)
    assert outcomes(second) == {}
    assert second.runs[0].unchanged == 5


async def _flow_runs() -> set[str]:
    from prefect import get_client

    async with get_client() as client:
        return {run.name for run in await client.read_flow_runs(limit=200)}


async def _events() -> list[tuple[str, str]]:
    """Events that reached the API, once those of alerts are among them or time is over."""
    from prefect import get_client

    found: list[tuple[str, str]] = []
    async with get_client() as client:
        for _ in range(300):
            answer = await client._client.post(
                "/events/filter", json={"filter": {"event": {"prefix": ["checkpoint."]}}, "limit": 50}
            )
            events: list[dict[str, Any]] = answer.json()["events"]
            found = [(event["event"], event["resource"]["prefect.resource.id"]) for event in events]
            if len(found) >= 3:
                break
            await asyncio.sleep(0.2)
    return found


def test_two_watchers_at_once_publish_once(
    bucket: Lifecycle, prefect_api: PrefectApi, tmp_path: Path
) -> None:
    settings = bucket.settings()
    for number in range(2):
        bucket.save(f"step_{number}")
    bucket.save("step_9", without=(".metadata",))
    environment = {**os.environ, **prefect_api.env, "PYTHONPATH": os.pathsep.join(sys.path)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(settings.file)],
            env={**environment, "PREFECT_HOME": str(tmp_path / f"home-{number}")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number in range(2)
    ]
    reports = []
    for worker in workers:
        out, err = worker.communicate(timeout=200)
        assert worker.returncode == 0, err.decode()
        reports.append(PassReport.model_validate_json(out))
    assert len(bucket.manifests()) == 2
    latest = bucket.published.child("aliases/latest")
    names = [o.name for o in latest.objects()]
    assert names == [f"{number:08d}.json" for number in range(1, len(names) + 1)]
    moves = [json.loads(latest.read(name, 1 << 16))["step"] for name in names]
    # Each watcher may have one of the two; where step_1 is published first the alias does not move back.
    assert moves in (["step_0", "step_1"], ["step_1"])
    told = [alert.first for report in reports for step in report.steps for alert in step.alerts]
    assert told.count(True) == 1
    for name in bucket.manifests():
        assert verify(f"{bucket.published.url}/{name}").ok
    assert outcomes(watch_once(settings)) == {}


@pytest.mark.usefixtures("prefect_api")
@pytest.mark.parametrize("gone", ["train", "published"])
def test_a_watcher_that_reaches_no_storage_is_no_green_run(tmp_path: Path, gone: str) -> None:
    life = Lifecycle(str(tmp_path / "place"), tmp_path / "settings")
    settings = life.settings()
    life.save("step_1")
    place = Path(life.url) / gone
    if gone == "train":
        place.rename(place.with_name("elsewhere"))
    else:
        # Nobody can make a directory there, not even root.
        place.symlink_to("/proc/self/fd")
    state = watch(config=str(settings.file), return_state=True)
    assert state.is_failed()
    assert f"not all runs could be seen to: run {RUN}: " in str(state.message)
    report = watch_in_flow(settings)
    assert (report.exit_code, report.runs[0].ok) == (3, False)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/api", "http://127.0.0.1:9"])
def test_a_prefect_that_does_not_answer_is_the_environment(tmp_path: Path, url: str) -> None:
    life = Lifecycle(str(tmp_path / "place"), tmp_path / "settings")
    life.save("step_1")
    environment = {**os.environ, "PREFECT_API_URL": url, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(life.settings().file)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert f"EnvironmentFault: Prefect's API at {url} does not answer" in done.stderr


@pytest.mark.usefixtures("prefect_api")
def test_one_step_on_demand_is_tried_again_beyond_its_limit(bucket: Lifecycle) -> None:
    bucket.save("step_1")
    wrong = bucket.settings(max_attempts=1, tables="[[runs.exports]]\nmemory_budget = 1\n")
    assert outcomes(watch_once(wrong)) == {"step_1": "export"}
    again = run_step(wrong, f"{bucket.source.url}/step_1")
    assert (again.outcome, again.attempts) == ("problem", 2)
    right = bucket.settings(max_attempts=1)
    assert outcomes(watch_once(right)) == {}
    step = run_step(right, f"{bucket.source.url}/step_1")
    assert step.outcome == "published"
    assert [alert.problem for alert in step.alerts] == ["recovered"]
