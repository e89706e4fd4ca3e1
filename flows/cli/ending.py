"""SIGTERM and SIGHUP end a command as Ctrl-C does: in order, so that nothing half-written stays behind.

Kubernetes and batch systems send SIGTERM, terminals that are closed send SIGHUP.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGHUP)


class EndedError(KeyboardInterrupt):
    """A signal asks the process to end. ``number`` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Raise `EndedError` at such a signal, unless it is ignored (as under nohup) or somebody else's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, _frame: FrameType | None) -> None:
    # The second one finds no more patience.
    signal.signal(number, signal.SIG_DFL)
    raise EndedError(number)
