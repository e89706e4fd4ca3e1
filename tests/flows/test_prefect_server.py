"""Prefect's temporary server ends with whoever started it, and not before them for long."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.support.waiting import runs, until

STARTER = """
import time
from flows.prefect_server import start_server
start_server()
from prefect.server.api.server import SubprocessASGIServer
server = SubprocessASGIServer()
print(server.server_process.pid, server.lifeline.pid, flush=True)
"""
REVIVED = """
from prefect import get_client
before, port = server, server.port
before.server_process.wait()
start_server()
with get_client(sync_client=True) as client:
    client.hello().raise_for_status()
server = SubprocessASGIServer()
assert server is not before and server.port == port
print(server.server_process.pid, server.lifeline.pid, flush=True)
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")


@contextmanager
def starter(code: str) -> Iterator[IO[bytes]]:
    """A process that runs ``code`` and waits; its output. It is killed in the end.

    The server takes this process's PREFECT_HOME, where another may have made the database.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    environment |= {
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    code += "\ntime.sleep(600)\n"
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.kill()


def pids(output: IO[bytes]) -> list[int]:
    """Of the server and of its lifeline."""
    server, lifeline = (int(pid) for pid in output.readline().split())
    return [server, lifeline]


@pytest.mark.slow
def test_the_server_ends_with_a_starter_that_is_killed() -> None:
    with starter(STARTER) as output:
        started = pids(output)
        assert all(map(runs, started))
    until(lambda: not any(map(runs, started)))


@pytest.mark.slow
def test_a_server_that_is_killed_is_started_again() -> None:
    with starter(STARTER + REVIVED) as output:
        started = pids(output)
        os.kill(started[0], signal.SIGKILL)
        again = pids(output)
        assert all(map(runs, again))
    until(lambda: not any(map(runs, started + again)))
