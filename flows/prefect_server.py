"""Starts the temporary server that Prefect uses where no other is configured, so that Ctrl-C is survived.

Prefect starts it as a child of whoever first needs it, in the same process group. Ctrl-C in a terminal goes
to the whole group: the server dies at once, and the flow that is being cancelled then asks it for minutes.
A child inherits which signals are blocked, so it is started from a thread that blocks SIGINT. It still ends
with its parent: by SIGTERM where that ends in order, by `flows.lifeline` where it is killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

from dcp.errors import EnvironmentFault

_HOST = "127.0.0.1"
_PATIENCE = 120.0
"""Seconds that the server may take to come up."""
_LIFELINE = Path(__file__).with_name("lifeline.py")


class InBackground:
    """A call in a thread that does not keep the process from ending when the user has had enough."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._error: Exception | None = None
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._call()
        # It is raised again where it can be told.
        except Exception as error:
            self._error = error

    def finish(self) -> None:
        """Wait for the end; raises what the call raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error


def start_server() -> None:
    """Start the temporary server if one is needed; it lives as long as this process."""
    InBackground(connect).finish()


def connect() -> None:
    """Talk to Prefect's API once."""
    from prefect import get_client

    _tie_server()
    with get_client(sync_client=True):
        pass


@contextmanager
def shown_ui() -> Iterator[str]:
    """Prefect's UI on loopback, on the database of the temporary server, which shows none; yields its URL.

    It is a server of its own that ends with the block, or with this process.

    Raises:
        EnvironmentFault: it does not come up.
    """
    import prefect
    from prefect.settings import get_current_settings

    with socket.socket() as free:
        free.bind((_HOST, 0))
        port = free.getsockname()[1]
    address = f"http://{_HOST}:{port}"
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(prefect.__module_path__.parent)]
    command += ["--factory", "prefect.server.api.server:create_app", "--lifespan", "on"]
    command += ["--host", _HOST, "--port", str(port), "--log-level", "error"]
    settings = get_current_settings().to_environment_variables(exclude_unset=True)
    own = {"PREFECT_SERVER_UI_ENABLED": "true", "PREFECT_SERVER_UI_API_URL": f"{address}/api"}
    server = subprocess.Popen(command, env={**os.environ, **settings, **own})
    lifeline = _lifeline(server.pid)
    try:
        _wait_for(f"{address}/api/health", server)
        yield address
    finally:
        server.terminate()
        server.wait()
        lifeline.communicate()


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise EnvironmentFault(f"Prefect's server did not come up at {url}")


def _lifeline(pid: int) -> subprocess.Popen[bytes]:
    """End process ``pid`` with this one. The lifeline's input closes with it, so the object must be kept."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_LIFELINE), str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _tie_server() -> None:
    """Have the temporary server, if Prefect is going to start one, end with this process."""
    from prefect.server.api.server import SubprocessASGIServer

    class TiedServer(SubprocessASGIServer):
        """The server with a lifeline."""

        lifeline: subprocess.Popen[bytes] | None = None

        def _run_uvicorn_command(self) -> subprocess.Popen[Any]:
            server = super()._run_uvicorn_command()
            self.lifeline = _lifeline(server.pid)
            return server

        def stop(self) -> None:
            super().stop()
            if self.lifeline is not None:
                self.lifeline.communicate()

    before = SubprocessASGIServer._instances.get(None)
    port = None
    if before is not None and before.server_process and before.server_process.poll() is not None:
        # It was killed. Clients that know its port find the next one there.
        port = before.port
        before.stop()
    if None not in SubprocessASGIServer._instances:
        # It registers itself as the instance that everybody gets.
        TiedServer().port = port
