"""Runs whose worker was killed, on a real Prefect API."""

import os
import subprocess
import sys
import uuid
from typing import Any

from flows.deploying.lost import end_lost_runs
from flows.deploying.server import Server
from tests.support.harness import PrefectApi


def test_only_a_run_without_a_process_is_ended(prefect_api: PrefectApi) -> None:
    server = Server(prefect_api.env["PREFECT_API_URL"])
    pool, other = (f"pool-{uuid.uuid4().hex[:8]}" for _ in range(2))
    for name in (pool, other):
        server.make_pool(name, {}, "")
    lost, alive, waiting = (_run(server, pool) for _ in range(3))
    elsewhere = _run(server, other)
    for run in (lost, alive, elsewhere):
        _set(server, run, "PENDING", force=False)
        _set(server, run, "RUNNING", force=False)
    refused = _run(server, pool)
    _set(server, refused, "PENDING", force=False)
    assert _state(server, refused) == "CANCELLED"
    environment = {**os.environ, "PREFECT__FLOW_RUN_ID": alive["id"]}
    worker = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    try:
        assert end_lost_runs(server, [pool]) == [lost["name"]]
        assert end_lost_runs(server, [pool]) == []
    finally:
        worker.communicate(b"\n", timeout=60)
    states = [_state(server, run) for run in (lost, alive, waiting, elsewhere)]
    assert states == ["CRASHED", "RUNNING", "SCHEDULED", "RUNNING"]
    # The slot that it held is free: of two at a time, one more may begin.
    _set(server, waiting, "PENDING", force=False)
    assert _state(server, waiting) == "PENDING"
    for run in (alive, waiting, elsewhere):
        _set(server, run, "CANCELLED")
    for name in (pool, other):
        server.ask("DELETE", f"work_pools/{name}")


def _run(server: Server, pool: str) -> dict[str, Any]:
    flow = server.ask("POST", "flows/", {"name": "lost"})["id"]
    deployment = server.ask(
        "POST",
        "deployments/",
        {
            "name": pool,
            "flow_id": flow,
            "work_pool_name": pool,
            "concurrency_limit": 2,
            "concurrency_options": {"collision_strategy": "CANCEL_NEW"},
        },
    )["id"]
    run: dict[str, Any] = server.ask(
        "POST", f"deployments/{deployment}/create_flow_run", {"state": {"type": "SCHEDULED"}}
    )
    return run


def _set(server: Server, run: dict[str, Any], state: str, force: bool = True) -> None:
    server.ask("POST", f"flow_runs/{run['id']}/set_state", {"state": {"type": state}, "force": force})


def _state(server: Server, run: dict[str, Any]) -> str:
    return str(server.ask("GET", f"flow_runs/{run['id']}")["state_type"])
