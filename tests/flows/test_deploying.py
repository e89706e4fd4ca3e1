"""A local deployment for real: server, pools, workers, deployments, automations; one for all tests here."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prefect import flow
from prefect.settings import PREFECT_API_URL, temporary_settings
from pydantic import ByteSize

from dcp.errors import EnvironmentFault, ResourceError
from flows import flow_runs
from flows.deploy_settings import PoolSettings
from flows.deploying.automations import BLOCK, PLACEHOLDER, load_automations, read_automations
from flows.deploying.local import LocalDeployment, Up
from flows.deploying.server import Server
from flows.elsewhere import ExportElsewhere
from flows.settings import LifecycleSettings
from tasks.alert import TITLES
from tasks.ledger import StepKey
from tasks.publish import verify
from tests.support.lifecycle import Lifecycle
from tests.support.postgres import postgres
from tests.support.tools import postgres_programs
from tests.support.train import make_checkpoint
from tests.support.web import Sink, free_port, webhook

PROJECT = Path(__file__).parents[2] / "deployments"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_PATIENCE = 600.0
"""Seconds for anything to happen: ten times what it takes, for machines with other things to do."""

DEPLOY = """
[deploy]
steps = "runs"
port = {port}
overhead = "1GiB"
[[deploy.pools]]
name = "default"
memory = "1GiB"
[[deploy.pools]]
name = "large-memory"
memory = "4GiB"
[[deploy.pools]]
name = "idle"
memory = "8GiB"
workers = 0
"""


@dataclass
class Place:
    """The deployment, and what it told."""

    life: Lifecycle
    settings: LifecycleSettings
    local: LocalDeployment
    up: Up
    sink: Sink
    called: list[dict[str, Any]]
    """What automations sent to their webhook."""
    database: str | None
    """None for SQLite."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("deployed")
    life = Lifecycle(str(directory / "place"), directory / "settings")
    local = LocalDeployment(directory / "state", PROJECT)
    with ExitStack() as stack:
        sink = stack.enter_context(webhook())
        hook = stack.enter_context(webhook())
        database = stack.enter_context(postgres()) if postgres_programs() else None
        settings = life.settings(
            top=f'interval = "10s"\nalerts = ["{sink.url}"]',
            tables=DEPLOY.format(port=free_port()),
            layouts=["fsdp=2", "fsdp=3"],
            # A pass may well come by while the job is writing.
            grace_period="30m",
        )
        Path(life.source.url).mkdir(parents=True)
        try:
            up = local.up(settings.file, print, database)
            load_automations(Server(up.api), PROJECT / "automations", hook.http)
            yield Place(life, settings, local, up, sink, hook.received, database)
        finally:
            local.down()
            assert _left(directory) == []


def test_a_step_of_a_training_job_is_published_and_a_broken_one_told(place: Place) -> None:
    source = Path(place.life.source.url)
    broken = source.parent / "broken"
    make_checkpoint(broken)
    cut = next(path for path in sorted(broken.glob("*.distcp")) if path.stat().st_size > 1000)
    cut.write_bytes(cut.read_bytes()[:500])
    make_checkpoint(source / "step_1")
    broken.rename(source / "step_2")
    _until(lambda: len(_manifests(place)) == 1 and len(place.sink.received) >= 1)
    [manifest] = _manifests(place)
    assert manifest.startswith("step_1/")
    assert verify(f"{place.life.published.url}/{manifest}").ok
    [told] = [each for each in place.sink.received if "step_2" in each["title"]]
    assert told["title"] == f"[{place.settings.runs[0].name}] step_2 is torn"
    assert "ckpt validate" in told["message"]
    _until(lambda: any(each["event"] == "checkpoint.torn" for each in place.called))
    [event] = [each for each in place.called if each["event"] == "checkpoint.torn"]
    assert event["resource"] == "checkpoint.demo.step_2"
    assert "files.truncated" in event["what"]
    assert event["command"].startswith("ckpt validate")
    runs = _runs(place.up.api)
    # The estimate with its overhead is more than the pool allows that the step itself was processed on.
    [export] = [run for run in runs if run["name"] == "demo-step_1-export-1"]
    assert export["work_pool_name"] == "large-memory"
    assert export["job_variables"]["memory"] > 1 << 30
    _until(lambda: _states(place.up.api, "demo-step_") == {"COMPLETED"})
    _pause_watch(place.up.api)


def test_an_export_beyond_its_memory_is_killed_and_told_with_both_numbers(place: Place) -> None:
    key = _published_key(place)
    memory = 60 << 20
    pool = PoolSettings(name="large-memory", memory=ByteSize(memory))
    error = _refused(place, pool=pool, key=key, overhead=memory, attempt=6)
    assert isinstance(error, ResourceError)
    assert "137" in str(error)
    assert "60.0 MiB of memory were estimated, 60.0 MiB are allowed there" in str(error)


def test_an_export_that_nobody_begins_is_cancelled_and_told(place: Place) -> None:
    key = _published_key(place)
    error = _refused(place, pool=PoolSettings(name="idle", memory=ByteSize(8 << 30)), key=key, pickup=2.0)
    assert "was begun by no worker within 2 s" in str(error)
    assert "prefect work-pool inspect idle" in str(error)
    [run] = [run for run in _runs(place.up.api) if run["name"].endswith("-export-7")]
    assert run["state_type"] == "CANCELLED"


def test_an_export_that_somebody_cancels_is_told_as_that(place: Place) -> None:
    key = _published_key(place)

    canceller = threading.Thread(target=_set_idle_run, args=(place, "CANCELLED"))
    canceller.start()
    error = _refused(place, pool=PoolSettings(name="idle", memory=ByteSize(8 << 30)), key=key, attempt=8)
    canceller.join()
    assert "was cancelled" in str(error)


def test_an_export_whose_worker_is_gone_is_told_as_that(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow_runs, "BEFORE_LEASE", 0.0)
    monkeypatch.setattr(flow_runs, "LOOK", 0.5)
    key = _published_key(place)
    begin = threading.Thread(target=_set_idle_run, args=(place, "RUNNING"))
    begin.start()
    error = _refused(place, pool=PoolSettings(name="idle", memory=ByteSize(8 << 30)), key=key, attempt=9)
    begin.join()
    assert "lost its worker" in str(error)
    [run] = [run for run in _runs(place.up.api) if run["name"].endswith("-export-9")]
    assert run["state_type"] == "CRASHED"


def test_forms_are_typed_and_described(place: Place) -> None:
    schemas = {
        deployment["name"]: deployment["parameter_openapi_schema"]
        for deployment in Server(place.up.api).ask("POST", "deployments/filter", {})
        if deployment["entrypoint"] == "flows.on_demand.export_checkpoint"
    }
    assert sorted(schemas) == ["default", "idle", "large-memory"]
    schema = schemas["large-memory"]
    assert schema["required"] == ["url", "folder"]
    assert all(schema["properties"][name]["description"] for name in ("url", "folder", "name", "config"))
    options = schema["definitions"]["ExportOptions"]["properties"]
    assert options["format"]["enum"] == ["torch", "safetensors"]
    assert all(option["description"] for option in options.values())


def test_the_server_takes_the_pool_for_kubernetes(place: Place) -> None:
    template = json.loads((PROJECT / "pools" / "kubernetes.json").read_text())
    pool = {"name": "cluster", "type": "kubernetes", "base_job_template": template}
    server = Server(place.up.api)
    assert server.ask("POST", "work_pools/", pool)["base_job_template"] == template
    server.ask("DELETE", "work_pools/cluster")


def test_every_alert_has_its_automation(place: Place) -> None:
    standing = Server(place.up.api).ask("POST", "automations/filter", {"limit": 200})
    names = [automation["name"] for automation in standing]
    assert len(names) == len(set(names))
    assert {f"ckpt-{problem}" for problem in TITLES} <= set(names)
    assert {"ckpt-stalled", "ckpt-junk", "ckpt-unreachable", "ckpt-published", "ckpt-watch-silent"} <= set(
        names
    )


def test_prefects_own_command_takes_the_files(place: Place, tmp_path: Path) -> None:
    text = (PROJECT / "automations" / "alerts.yaml").read_text()
    file = tmp_path / "alerts.yaml"
    file.write_text(text.replace(f"${{{PLACEHOLDER}}}", _block(place)).replace("name: ckpt-", "name: cli-"))
    environment = {**os.environ, "PREFECT_API_URL": place.up.api, "PREFECT_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "prefect", "automation", "create", "--from-file", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    server = Server(place.up.api)
    made = [
        automation
        for automation in server.ask("POST", "automations/filter", {"limit": 200})
        if automation["name"].startswith("cli-")
    ]
    for automation in made:
        server.ask("DELETE", f"automations/{automation['id']}")
    assert {automation["name"] for automation in made} >= {f"cli-{problem}" for problem in TITLES}


def test_the_silence_of_the_watcher_is_told(place: Place) -> None:
    automations = read_automations(PROJECT / "automations", _block(place))
    [silence] = [each for each in automations if each["name"] == "ckpt-watch-silent"]
    # A completed run of watch begins the wait, and here no other one ends it.
    quick = {"expect": ["prefect.flow-run.NothingSuch"], "within": 10}
    server = Server(place.up.api)
    made = server.ask(
        "POST",
        "automations/",
        {**silence, "name": "quick", "trigger": {**silence["trigger"], **quick}},
    )

    @flow(name="watch")
    def passed() -> None:
        pass

    def told() -> bool:
        return any(sent["event"] == "watch-silent" for sent in place.called)

    def told_after_a_pass() -> bool:
        # The server takes seconds to know a new automation, and a busy one with SQLite drops events
        # (`database is locked`): passes go on, as they do in a deployment.
        with temporary_settings({PREFECT_API_URL: place.up.api}):
            passed()
        with suppress(AssertionError):
            _until(told, 15)
        return told()

    _until(told_after_a_pass)
    server.ask("DELETE", f"automations/{made['id']}")


def test_bringing_it_up_again_replaces_only_what_died(place: Place) -> None:
    def pids() -> dict[str, int]:
        files = (place.local.state / "processes").glob("*.json")
        return {file.stem: json.loads(file.read_text())["pid"] for file in files}

    before = pids()
    os.kill(before["large-memory-1"], signal.SIGKILL)
    again = place.local.up(place.settings.file, print, place.database)
    assert again == place.up
    assert {name for name, pid in pids().items() if pid != before[name]} == {"large-memory-1"}


def _refused(
    place: Place,
    *,
    pool: PoolSettings,
    key: StepKey,
    pickup: float = 240.0,
    attempt: int = 7,
    overhead: int = 0,
) -> EnvironmentFault:
    """What becomes of an export on this pool, asked for by a parent outside of every pool."""
    deploy = place.settings.deploy.model_copy(
        update={"pools": (pool,), "overhead": ByteSize(overhead), "pickup_timeout": pickup}
    )
    settings = place.settings.model_copy(update={"deploy": deploy})
    run = settings.runs[0].model_copy(update={"exports": ()})
    elsewhere = ExportElsewhere(settings, run, place.life.ledger, poll=0.5)

    @flow(name="parent")
    def parent() -> None:
        elsewhere(key, attempt, ())

    with temporary_settings({PREFECT_API_URL: place.up.api}), pytest.raises(EnvironmentFault) as caught:
        parent()
    return caught.value


def _set_idle_run(place: Place, state: str) -> None:
    """Give the waiting run on the idle pool a state, once there is one."""

    def waiting() -> list[dict[str, Any]]:
        found = [run for run in _runs(place.up.api) if run["work_pool_name"] == "idle"]
        return [run for run in found if run["state_type"] == "SCHEDULED"]

    _until(lambda: bool(waiting()))
    body = {"state": {"type": state}, "force": True}
    httpx.post(f"{place.up.api}/flow_runs/{waiting()[0]['id']}/set_state", json=body, timeout=60)


def _published_key(place: Place) -> StepKey:
    [key] = place.life.ledger.keys("step_1")
    return key


def _block(place: Place) -> str:
    server = Server(place.up.api)
    return str(server.ask("GET", f"block_types/slug/webhook/block_documents/name/{BLOCK}")["id"])


def _manifests(place: Place) -> list[str]:
    root = Path(place.life.published.url)
    return [str(path.relative_to(root)) for path in root.glob("step_*/*/manifest.json")]


def _runs(api: str) -> list[dict[str, Any]]:
    """Runs that have to do with a step."""
    body = {"flow_runs": {"name": {"like_": "demo-"}}, "limit": 200}
    found: list[dict[str, Any]] = Server(api).ask("POST", "flow_runs/filter", body)
    return found


def _states(api: str, prefix: str) -> set[str]:
    return {run["state_type"] for run in _runs(api) if run["name"].startswith(prefix)}


def _pause_watch(api: str) -> None:
    """No more passes: those of every 10 s take a good part of a small machine from the tests that follow."""
    server = Server(api)
    watch = {"deployments": {"name": {"any_": ["watch"]}}}
    [deployment] = server.ask("POST", "deployments/filter", watch)
    server.ask("PATCH", f"deployments/{deployment['id']}", {"paused": True})


def _until(done: Callable[[], bool], seconds: float = _PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.3)


def _left(directory: Path) -> list[str]:
    """Command lines of processes that still belong to the deployment."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        environment = process.info["environ"] or {}
        if str(directory) in environment.get("PREFECT_HOME", ""):
            found.append(" ".join(process.info["cmdline"] or ()))
    return found
