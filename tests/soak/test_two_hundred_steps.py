"""Two hundred steps appear at once: two workers process them all, on PostgreSQL, without one failed run.

Takes a quarter of an hour or more on two cores, so it is run by hand, with -s to see it go on.
SOAK_STEPS says how many steps, where fewer are wanted.
"""

import os
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from dcp.errors import NotFoundError
from flows.deploying.local import LocalDeployment
from tests.support.lifecycle import Lifecycle
from tests.support.postgres import postgres
from tests.support.web import free_port

STEPS = int(os.environ.get("SOAK_STEPS", "200"))
PROJECT = Path(__file__).parents[2] / "deployments"

DEPLOY = """
[deploy]
steps = "runs"
max_runs = 40
port = {port}
[[deploy.pools]]
name = "default"
memory = "2GiB"
workers = 2
runs = 2
[[deploy.pools]]
name = "large-memory"
memory = "8GiB"
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]


def test_two_hundred_steps_at_once_on_two_workers() -> None:
    directory = Path(tempfile.mkdtemp(prefix="ckpt-soak-"))
    try:
        life = Lifecycle(str(directory / "place"), directory / "settings")
        settings = life.settings(tables=DEPLOY.format(port=free_port()), top='interval = "30s"')
        local = LocalDeployment(directory / "state", PROJECT)
        with postgres() as database:
            try:
                up = local.up(settings.file, print, database)
                assert up.workers == ["default-1", "default-2", "large-memory-1"]
                for number in range(1, STEPS + 1):
                    life.save(f"step_{number}")
                started = time.monotonic()
                _wait(life, started)
                seconds = time.monotonic() - started
                states = _states(up.api)
            finally:
                local.down()
        print(f"{STEPS} steps in {seconds:.0f} s with 2 workers: {states}")
        assert len(life.manifests()) == STEPS
        assert len(_aliases(life)) >= 1
        # A watch that meets one at work is cancelled; that is how only one is at work.
        assert set(states["process-checkpoint"]) == {"COMPLETED"}
        assert sum(states["process-checkpoint"].values()) == STEPS
        assert {state for flow in states.values() for state in flow}.isdisjoint({"FAILED", "CRASHED"})
        for number in range(1, STEPS + 1):
            [records] = life.records(f"step_{number}")
            assert records == {"seen", "validated", "test-loaded", "exported", "published"}
    finally:
        shutil.rmtree(directory)


def _wait(life: Lifecycle, started: float) -> None:
    told = -1
    while (done := _published(life)) < STEPS:
        if done // 10 > told:
            told = done // 10
            print(f"{done} published after {time.monotonic() - started:.0f} s", flush=True)
        assert time.monotonic() - started < 5000
        time.sleep(2)
    # The last runs still have to say that they are done.
    time.sleep(30)


def _published(life: Lifecycle) -> int:
    try:
        return len(life.manifests())
    except NotFoundError:
        return 0  # nothing has been written yet


def _aliases(life: Lifecycle) -> list[str]:
    return [info.name for info in life.published.child("aliases/latest").objects()]


def _states(api: str) -> dict[str, Counter[str]]:
    """How many runs of each flow are in which state, those in the future left out."""
    flows = {flow["id"]: flow["name"] for flow in _filter(api, "flows")}
    states: dict[str, Counter[str]] = {}
    for run in _filter(api, "flow_runs"):
        if run["state_type"] != "SCHEDULED":
            states.setdefault(flows[run["flow_id"]], Counter())[run["state_type"]] += 1
    return states


def _filter(api: str, what: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        body = {"limit": 200, "offset": len(found)}
        page = httpx.post(f"{api}/{what}/filter", json=body, timeout=60).json()
        found += page
        if len(page) < 200:
            return found
