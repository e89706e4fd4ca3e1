"""Workers of a real deployment are killed at random moments: every step is published, once and whole.

Run it by hand, with -s. SOAK_KILLS says how often a worker is killed, SOAK_STEPS how many steps there are.
"""

import json
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

from dcp.errors import NotFoundError
from flows.deploying.local import LocalDeployment
from tasks.publish import verify
from tests.support.lifecycle import Lifecycle
from tests.support.postgres import postgres
from tests.support.web import free_port

KILLS = int(os.environ.get("SOAK_KILLS", "20"))
STEPS = int(os.environ.get("SOAK_STEPS", "8"))
PROJECT = Path(__file__).parents[2] / "deployments"

DEPLOY = """
[deploy]
steps = "runs"
port = {port}
overhead = "1GiB"
[[deploy.pools]]
name = "default"
memory = "1GiB"
workers = 2
runs = 1
[[deploy.pools]]
name = "large-memory"
memory = "8GiB"
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


def test_workers_killed_at_random() -> None:
    chance = random.Random(KILLS)
    directory = Path(tempfile.mkdtemp(prefix="ckpt-soak-"))
    try:
        life = Lifecycle(str(directory / "place"), directory / "settings")
        settings = life.settings(
            tables=DEPLOY.format(port=free_port()),
            top='interval = "10s"\nlease_expiry = "10s"',
            max_attempts=100,
        )
        local = LocalDeployment(directory / "state", PROJECT)
        with postgres() as database:
            try:
                local.up(settings.file, print, database)
                for number in range(1, STEPS + 1):
                    life.save(f"step_{number}")
                started = time.monotonic()
                for kill in range(1, KILLS + 1):
                    time.sleep(chance.uniform(5, 40))
                    worker = chance.choice(["default-1", "default-2", "large-memory-1"])
                    mark = json.loads((directory / "state/processes" / f"{worker}.json").read_text())
                    os.killpg(mark["pid"], signal.SIGKILL)
                    print(f"kill {kill}: {worker}; {_published(life)} published", flush=True)
                    if len(_published(life)) == STEPS:
                        life.save(f"step_{STEPS + kill}")
                    local.up(settings.file, print, database)
                wanted = {info.name.partition("/")[0] for info in life.source.objects()}
                while {name.partition("/")[0] for name in _published(life)} != wanted:
                    assert time.monotonic() - started < 5000, _published(life)
                    time.sleep(2)
            finally:
                local.down()
        print(f"{len(wanted)} steps through {KILLS} kills in {time.monotonic() - started:.0f} s")
        assert len(_published(life)) == len(wanted)
        for name in _published(life):
            assert verify(f"{life.published.url}/{name}").ok
        for step in wanted:
            [records] = life.records(step)
            assert {"validated", "test-loaded", "exported", "published"} <= records
            assert not any(record.startswith("alerted") for record in records)
    finally:
        shutil.rmtree(directory)


def _published(life: Lifecycle) -> list[str]:
    try:
        return life.manifests()
    except NotFoundError:
        return []  # nothing has been written yet
