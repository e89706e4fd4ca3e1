"""HTTP servers on loopback, in a thread of the test; one of them keeps what it is sent."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def free_port() -> int:
    """A port of loopback that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class QuietHandler(BaseHTTPRequestHandler):
    """Writes no log, and answers in one call."""

    def body(self) -> bytes:
        """What was sent."""
        return self.rfile.read(int(self.headers["Content-Length"]))

    def answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Tests are quiet."""


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Run a server and yield its endpoint, ``host:port``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    # A request that the test leaves unanswered must not keep the test from its end.
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Sink:
    """A webhook, and what it took."""

    place: str
    """``host:port``"""
    received: list[dict[str, Any]] = field(default_factory=list)
    """The documents that it answered with success."""
    authorizations: list[str | None] = field(default_factory=list)
    """That header of all requests, refused ones too."""
    refusals: list[int] = field(default_factory=list)
    """Statuses of the next answers."""
    broken: bool = False
    """Whether it answers everything with an error."""

    @property
    def http(self) -> str:
        """Its address."""
        return f"http://{self.place}/hook"

    @property
    def url(self) -> str:
        """Its address as apprise writes it."""
        return f"json://{self.place}/hook"


@contextmanager
def webhook(*refusals: int) -> Iterator[Sink]:
    """A server that takes JSON documents, after it has answered with these statuses."""

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            document = json.loads(self.body())
            sink.authorizations.append(self.headers["Authorization"])
            if sink.refusals:
                self.answer(sink.refusals.pop(0))
            elif sink.broken:
                self.answer(500)
            else:
                sink.received.append(document)
                self.answer(200)

    with served(Handler) as place:
        sink = Sink(place, refusals=list(refusals))
        yield sink
