"""Starts the temporary server that Prefect uses where no other is configured, so that Ctrl-C is survived.

Prefect starts it as a child of whoever first needs it, in the same process group. Ctrl-C in a terminal goes
to the whole group: the server dies at once, and the flow that is being cancelled then asks it for minutes.
A child inherits which signals are blocked, so it is started from a thread that blocks SIGINT. It still ends
with its parent: by SIGTERM where that ends in order, by `flows.lifeline` where it is killed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

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


def local_address() -> str:
    """The URL of the temporary server, which is started if it is not there yet."""
    start_server()
    from prefect.server.api.server import SubprocessASGIServer

    return SubprocessASGIServer().address


def _tie_server() -> None:
    """Have the temporary server, if Prefect is going to start one, end with this process."""
    from prefect.server.api.server import SubprocessASGIServer

    class TiedServer(SubprocessASGIServer):
        """The server with a lifeline."""

        lifeline: subprocess.Popen[bytes] | None = None

        def _run_uvicorn_command(self) -> subprocess.Popen[Any]:
            server = super()._run_uvicorn_command()
            # Its input closes with this process, so the object must be kept.
            self.lifeline = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_LIFELINE), str(server.pid)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            return server

        def stop(self) -> None:
            super().stop()
            if self.lifeline is not None:
                self.lifeline.communicate()

    if None not in SubprocessASGIServer._instances:
        # It registers itself as the instance that everybody gets.
        TiedServer()
