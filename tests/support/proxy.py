"""A proxy on loopback between a client and a real storage server, which damages chosen exchanges."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

Fault = Literal["503", "reset", "short", "lost", "flipped", "stuck"]
"""What happens to an exchange: the answer 503, a connection reset at once, an answer that ends halfway, an
answer that is lost after the server did as asked, a request whose body has one bit changed, or a request
that is held until the proxy ends."""

Rule = Callable[[str, str], Fault | None]
"""Asked with method and target of each request."""


@dataclass
class FaultProxy:
    """A running proxy. Requests pass unharmed while `rule` is None."""

    endpoint: str
    rule: Rule | None = None
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and target of all requests so far."""
    ended: threading.Event = field(default_factory=threading.Event)

    def each(self, fault: Fault, *, method: str, containing: str = "", times: int | None = None) -> None:
        """Do this to the next ``times`` requests of that kind; to all of them if it is None."""
        left = threading.Semaphore(times) if times is not None else None

        def rule(asked: str, target: str) -> Fault | None:
            if asked != method or containing not in target:
                return None
            return fault if left is None or left.acquire(blocking=False) else None

        self.rule = rule


@contextmanager
def fault_proxy(backend: str) -> Iterator[FaultProxy]:
    """Run a proxy in front of the endpoint ``backend``."""
    host = urlsplit(backend).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body are written apart, and a client's acknowledgement may wait for 40 ms.
        disable_nagle_algorithm = True

        def answer(self) -> None:
            target, method = self.path, self.command
            with suppress(OSError):
                body = self._body()
                proxy.requests.append((method, target))
                fault = proxy.rule(method, target) if proxy.rule else None
                self._exchange(method, target, body, fault)

        def _body(self) -> bytes:
            if self.headers.get("Expect", "").lower() == "100-continue":
                self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            del self.headers["Transfer-Encoding"]
            return body

        def _exchange(self, method: str, target: str, body: bytes, fault: Fault | None) -> None:
            if fault == "stuck":
                proxy.ended.wait()
            if fault in ("reset", "stuck"):
                return self._reset()
            if fault == "503":
                return self._send(503, {"Content-Type": "text/plain"}, b"busy")
            if fault == "flipped":
                at = len(body) // 2
                body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
            headers = {k: v for k, v in self.headers.items() if k.lower() not in ("expect", "connection")}
            backend = http.client.HTTPConnection(host, timeout=60)
            try:
                backend.request(
                    method, target, body=body, headers={**headers, "Content-Length": str(len(body))}
                )
                response = backend.getresponse()
                data = response.read()
            finally:
                backend.close()
            if fault == "lost":
                return self._reset()
            self._send(response.status, dict(response.getheaders()), data, cut=fault == "short")
            return None

        def _send(self, status: int, headers: dict[str, str], data: bytes, *, cut: bool = False) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            length = headers.get("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", length or str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if cut else data)
            if cut:
                self.close_connection = True

        def _reset(self) -> None:
            # Without lingering, a close is a reset.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True

        do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = do_HEAD = answer

        def log_message(self, format: str, *args: object) -> None:
            """Tests are quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    proxy = FaultProxy(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
