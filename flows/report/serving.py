"""Shows written pages to a browser on this machine alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

from dcp.errors import UsageError

HOST = "127.0.0.1"


@contextmanager
def served(pages: Mapping[str, bytes], port: int = 0) -> Iterator[str]:
    """Serve pages on loopback while the block runs; yields the URL of the first.

    Nothing else is ever read or listed, and only requests that name the loopback host are answered, so that
    a web page elsewhere cannot read along under a name of its own.

    Args:
        pages: by path without a leading slash.
        port: 0 for any free one.

    Raises:
        UsageError: the port is taken.
    """
    try:
        server = ThreadingHTTPServer((HOST, port), _handler(pages))
    except OSError as error:
        raise UsageError(f"port {port} cannot be listened on: {error.strerror}; choose another") from None
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_port}/{next(iter(pages))}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(pages: Mapping[str, bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def _answer(self, *, body: bool) -> None:
            asked = unquote(urlsplit(self.path).path).lstrip("/") or next(iter(pages))
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            page = pages.get(asked) if host in (HOST, "localhost") else None
            self.send_response(200 if page is not None else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page or b"")))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            if body and page is not None:
                self.wfile.write(page)

        def log_message(self, format: str, *args: Any) -> None:
            """Nobody reads a log of a page that is looked at."""

    return Handler
