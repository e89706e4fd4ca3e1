"""Prefect's temporary server ends with whoever started it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import runs, until

STARTER = """
import time
from flows.prefect_server import start_server
start_server()
from prefect.server.api.server import SubprocessASGIServer
server = SubprocessASGIServer()
print(server.server_process.pid, server.lifeline.pid, flush=True)
time.sleep(600)
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")


@pytest.mark.slow
def test_the_server_ends_with_a_starter_that_is_killed(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    environment |= {
        "PREFECT_HOME": str(tmp_path),
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    starter = subprocess.Popen([sys.executable, "-c", STARTER], env=environment, stdout=subprocess.PIPE)
    assert starter.stdout is not None
    started = [int(pid) for pid in starter.stdout.readline().split()]
    assert len(started) == 2
    assert all(map(runs, started))
    starter.kill()
    starter.wait(timeout=60)
    starter.stdout.close()
    until(lambda: not any(map(runs, started)))
