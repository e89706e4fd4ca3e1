"""Where alerts go beside Prefect's events: apprise URLs, all at once, so that none waits for another.

`send_all` sends to every sink in a thread of its own and gives a `Delivery` for each. A sink that refuses is
tried again a few times; one that hangs is given up, and for a while whatever else this process has to tell
is not tried on it: later passes do that (`tasks.alert`), and the pass goes on.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Thread

from dcp.findings import Report
from tasks.text import plain

_TRIES = 3
_HANGS = 2.0
"""Seconds after which an attempt that failed is taken for one on a sink that hangs."""
_DEADLINE = 30.0
"""Seconds for all sinks together. apprise itself gives up a connection, and an answer, after 4 s each."""
_REST = 60.0
"""Seconds for which a sink that hung is left alone."""

_hung: dict[str, float] = {}
"""When sinks last hung, by `sink_name`, on the monotonic clock."""


class Delivery(Report):
    """What one sink made of an alert. ``sink`` is the URL without secrets, or ``prefect-event``."""

    sink: str
    ok: bool
    attempts: int
    error: str | None = None


@dataclass
class _Sending:
    """One sink's part of a message; ``made`` once it is over."""

    url: str
    title: str
    body: str
    name: str = field(init=False)
    made: Delivery | None = None

    def __post_init__(self) -> None:
        self.name = sink_name(self.url)
        self.thread = Thread(target=self._send, daemon=True, name=f"alert-{self.name}")

    def _send(self) -> None:
        self.made = _sent(self.url, self.name, self.title, self.body)

    def wait(self, deadline: float) -> Delivery:
        self.thread.join(max(0.0, deadline - time.monotonic()))
        if self.made is None:
            _hung[self.name] = time.monotonic()
            error = f"no answer within {_DEADLINE:.0f} s"
            return Delivery(sink=self.name, ok=False, attempts=1, error=error)
        return self.made


def send_all(urls: Sequence[str], *, title: str, body: str) -> list[Delivery]:
    """Send a message to these apprise URLs; what became of it, in their order. Raises nothing."""
    sendings = [_Sending(url, title, body) for url in urls]
    deadline = time.monotonic() + _DEADLINE
    for sending in sendings:
        sending.thread.start()
    return [sending.wait(deadline) for sending in sendings]


def sink_name(url: str) -> str:
    """A name for a sink that tells it from others and gives nothing secret away."""
    import apprise

    service = apprise.Apprise.instantiate(url, suppress_exceptions=True)
    shown = service.url(privacy=True) if service else f"{url.partition('://')[0][:20]}://"
    scheme, _, rest = str(shown).partition("://")
    host = rest.partition("?")[0].partition("/")[0].rpartition("@")[2]
    return f"{scheme}://{host}#{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def _sent(url: str, sink: str, title: str, body: str) -> Delivery:
    """Send to one apprise URL, at most `_TRIES` times, and once where it hangs."""
    import apprise

    since = time.monotonic() - _hung.get(sink, -_REST)
    if since < _REST:
        error = f"not tried: it did not answer {since:.0f} s ago"
        return Delivery(sink=sink, ok=False, attempts=0, error=error)
    service = apprise.Apprise()
    if not service.add(url):
        return Delivery(sink=sink, ok=False, attempts=0, error="apprise does not understand this URL")
    error = ""
    log = apprise.logging.getLogger("apprise")
    # Whatever the program has set for all loggers, apprise gives its reasons nowhere else.
    log.setLevel(logging.WARNING)
    for attempt in range(1, _TRIES + 1):
        started = time.monotonic()
        said = _Said()
        log.addHandler(said)
        try:
            if service.notify(
                body=body,
                title=title,
                notify_type=apprise.NotifyType.WARNING,
                body_format=apprise.NotifyFormat.TEXT,
            ):
                return Delivery(sink=sink, ok=True, attempts=attempt)
            error = "\n".join(said.lines)
        # Plugins call into libraries of any kind; a broken one must not stop the pipeline.
        except Exception as failed:
            error = f"{type(failed).__name__}: {failed}"
        finally:
            log.removeHandler(said)
        if time.monotonic() - started > _HANGS:
            _hung[sink] = time.monotonic()
            break
        if attempt < _TRIES:
            time.sleep(0.5 * attempt)
    return Delivery(sink=sink, ok=False, attempts=attempt, error=plain(error, 300) or "not accepted")


class _Said(logging.Handler):
    """Keeps what apprise says of one sending: it has one logger for all, and threads of its own."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        # apprise hands the context on to its threads.
        _listening.set(self)

    def emit(self, record: logging.LogRecord) -> None:
        if _listening.get() is self:
            self.lines.append(record.getMessage())


_listening: ContextVar[_Said | None] = ContextVar("_listening", default=None)
