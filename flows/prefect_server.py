"""Starts the temporary server that Prefect uses where no other is configured, so that Ctrl-C is survived.

Prefect starts it as a child of whoever first needs it, in the same process group. Ctrl-C in a terminal goes
to the whole group: the server dies at once, and the flow that is being cancelled then asks it for minutes.
A child inherits which signals are blocked, so it is started from a thread that blocks SIGINT. It still ends
with its parent, by SIGTERM.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from threading import Thread


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

    with get_client(sync_client=True):
        pass
