"""How far an export is, as a Prefect progress artifact: bytes, rate and the time that is left.

The export only leaves numbers behind; a thread sends them every few seconds. An API that is slow or away
therefore delays and fails nothing: it is missed once in the log, and the next numbers are tried again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from threading import Event, Thread
from types import TracebackType
from uuid import UUID

from tasks.artifacts import LAST_SECONDS, artifact_key

logger = logging.getLogger(__name__)

EVERY = 5.0
"""Seconds between two updates."""
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


Listener = Callable[[str, int, int], None]
"""Told what is done, bytes done and bytes in all."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Have the progress of every stage that runs in this context told to ``listener`` too."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def told(what: str) -> Callable[[int, int], None] | None:
    """What a stage may call with bytes done and bytes in all; None where nobody listens."""
    listener = _listener.get()
    return None if listener is None else partial(listener, what)


class ProgressArtifact:
    """Call it with bytes done and bytes in all, within a ``with`` block inside a Prefect run."""

    def __init__(self, what: str, *, key: str = "", every: float = EVERY) -> None:
        """
        Args:
            what: in words.
            key: of the artifact; made of ``what`` where it is not given.
            every: seconds between updates.
        """
        self.what = what
        self.key = key or artifact_key(what)
        self._every = every
        self._numbers = (0, 0)
        self._heard = told(what)
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
        if self._heard is not None:
            self._heard(done, total)

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
        size, unit = next((each for each in _UNITS if total >= each[0]), _UNITS[-1])
        text = f"{self.what}: {done / size:.2f} of {total / size:.2f} {unit}"
        if self._file > 1:
            text += f" of artifact {self._file}"
        if rate:
            text += f" at {rate / 1e6:.3g} MB/s"
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
