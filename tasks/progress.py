"""How far an export is, as a Prefect progress artifact: bytes, rate and the time that is left.

The export only leaves numbers behind; a thread sends them every few seconds. An API that is slow or away
therefore delays and fails nothing: it is missed once in the log, and the next numbers are tried again.
"""

from __future__ import annotations

import logging
import re
import time
from contextvars import copy_context
from threading import Event, Thread
from types import TracebackType
from uuid import UUID

logger = logging.getLogger(__name__)

EVERY = 5.0
"""Seconds between two updates."""
LAST_SECONDS = 5.0
"""How long the last update may hold up what follows."""


class ProgressArtifact:
    """Call it with bytes done and bytes in all, within a ``with`` block inside a Prefect run."""

    def __init__(self, what: str, *, every: float = EVERY) -> None:
        """
        Args:
            what: in words; the artifact's key is made of it.
            every: seconds between updates.
        """
        self.what = what
        self.key = re.sub("[^a-z0-9]+", "-", what.lower()).strip("-")
        self._every = every
        self._numbers = (0, 0)
        self._file = 1
        self._started = time.monotonic()
        self._sent: tuple[int, int, int] | None = None
        self._artifact: UUID | None = None
        self._missed = False
        self._ended = Event()
        # The run to which the artifact belongs is found through the context.
        self._thread = Thread(
            target=copy_context().run, args=(self._send,), name="progress-artifact", daemon=True
        )

    def __call__(self, done: int, total: int) -> None:
        if done < self._numbers[0]:
            self._file += 1
            self._started = time.monotonic()
        self._numbers = (done, total)

    def __enter__(self) -> ProgressArtifact:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(LAST_SECONDS)

    def description(self) -> str:
        """The numbers in words."""
        done, total = self._numbers
        seconds = max(time.monotonic() - self._started, 1e-3)
        rate = done / seconds
        text = f"{self.what}: {done / 1e9:.2f} of {total / 1e9:.2f} GB"
        if self._file > 1:
            text += f" of artifact {self._file}"
        if rate:
            text += f" at {rate / 1e6:.0f} MB/s"
        if rate and done < total:
            text += f", {(total - done) / rate:.0f} s left"
        return text

    def _send(self) -> None:
        while True:
            ended = self._ended.wait(self._every if self._sent else 0)
            now = (self._file, *self._numbers)
            if now != self._sent:
                self._sent = now
                self._post(100.0 * now[1] / now[2] if now[2] else 0.0)
            if ended:
                return

    def _post(self, percent: float) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        try:
            if self._artifact is None:
                made = create_progress_artifact(percent, key=self.key, description=self.description())
                self._artifact = made if isinstance(made, UUID) else None
            else:
                update_progress_artifact(self._artifact, percent, description=self.description())
        # Whatever is wrong with the API, the export is not to fail for it.
        except Exception as error:
            if not self._missed:
                logger.warning("the progress of %s cannot be shown: %s", self.what, error)
            self._missed = True
