"""An HTTP server that takes notices of committed steps and has exactly these steps processed.

Notices are answered at once and processed one after another: `Listener` keeps a bounded queue in which a step
stands once. Who may send is decided by a `Guard`: a shared secret, or a Google-signed token of a Pub/Sub
subscription. Whatever is lost here is found by the next pass of the watcher.

Answers: 202 taken; 204 nothing to do; 400 no notice, or of no step in the settings; 401 not allowed; 405 not
POST; 411 and 413 no length, or too large; 429 the queue is full, so the sender should come again.
"""

from __future__ import annotations

import hmac
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import BoundedSemaphore, Condition, Thread, Timer
from typing import Any

from dcp.errors import EnvironmentFault, UsageError
from flows.notices import LIMIT, BadNoticeError, Step, step_of_notice
from flows.settings import LifecycleSettings

PORT = 8377
WAITING = 1000
"""Steps that may wait to be processed."""

_SECONDS = 10.0
"""For one request in all, and between two of its bytes."""
_AT_ONCE = 16

_log = logging.getLogger(__name__)

Verify = Callable[[str], dict[str, Any]]
"""Checks a signed token and gives its claims; raises `ValueError` if it is not to be trusted."""


@dataclass(frozen=True)
class Guard:
    """Who may send notices; nobody is asked for anything where both are None."""

    secret: str | None = None
    verify: Verify | None = None
    sender: str | None = None
    """E-mail address of the service account that a verified token must be of."""

    def allows(self, authorization: str) -> bool:
        """Whether a request with this ``Authorization`` header may be taken."""
        if self.secret is None and self.verify is None:
            return True
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token:
            return False
        if self.secret is not None and hmac.compare_digest(token.encode(), self.secret.encode()):
            return True
        if self.verify is None:
            return False
        try:
            claims = self.verify(token)
        # google-auth raises its own errors beside ValueError; none of them lets anybody in.
        except Exception as error:
            _log.warning("a token was refused: %s", type(error).__name__)
            return False
        verified = claims.get("email_verified") is True
        return self.sender is None or (verified and claims.get("email") == self.sender)


def google_tokens(audience: str, certs_url: str | None = None) -> Verify:
    """The check of tokens with which Pub/Sub pushes; ``audience`` is as its subscription was given.

    Args:
        audience: what tokens must have been made for.
        certs_url: where the signers' certificates are; Google's by default.
    """
    from google.auth.transport.requests import Request
    from google.oauth2 import id_token

    places: dict[str, Any] = {} if certs_url is None else {"certs_url": certs_url}

    def verify(token: str) -> dict[str, Any]:
        claims: dict[str, Any] = dict(id_token.verify_token(token, Request(), audience, **places))
        if claims.get("iss") not in ("accounts.google.com", "https://accounts.google.com"):
            raise ValueError("the token is not of Google's making")
        return claims

    return verify


class Listener:
    """The server and its queue. As a context it listens; `work` processes what was taken."""

    def __init__(
        self,
        settings: LifecycleSettings,
        guard: Guard,
        *,
        host: str = "127.0.0.1",
        port: int = PORT,
        waiting: int = WAITING,
    ) -> None:
        """Listen at ``host`` and ``port``, 0 for any free one.

        Raises:
            EnvironmentFault: nothing can listen there.
        """
        self.settings = settings
        self.guard = guard
        self.most = waiting
        self._waiting: dict[Step, None] = {}
        self._changed = Condition()
        self._ended = False
        try:
            self._server = _Server((host, port), self)
        except OSError as error:
            raise EnvironmentFault(f"cannot listen at {host}:{port} ({error.strerror or error})") from None
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)

    @property
    def url(self) -> str:
        """Where notices are taken."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/"

    def __enter__(self) -> Listener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def end(self) -> None:
        """Have `work` return after the step it is at."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def take(self, step: Step) -> bool:
        """Put a step at the end of the queue, unless it stands there; False if the queue is full."""
        with self._changed:
            if step not in self._waiting:
                if len(self._waiting) >= self.most:
                    return False
                self._waiting[step] = None
                self._changed.notify()
            return True

    def work(self, process: Callable[[Step], None]) -> None:
        """Process steps as they come, until `end` is called."""
        while True:
            with self._changed:
                while not self._waiting and not self._ended:
                    self._changed.wait(1.0)
                if self._ended:
                    return
                # Taken out before it is processed: it may be saved again meanwhile, and told again.
                step = next(iter(self._waiting))
                del self._waiting[step]
            process(step)

    def answer(self, authorization: str, body: bytes) -> int:
        """Take a notice, or not, and give the HTTP status that says so."""
        if not self.guard.allows(authorization):
            return 401
        try:
            step = step_of_notice(self.settings, body)
        except BadNoticeError as error:
            _log.warning("%s", error)
            return 400
        if step is None:
            return 204
        return 202 if self.take(step) else 429


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    patience = _SECONDS
    request_queue_size = 1024
    """Connections that wait to be accepted: all ranks of a job may send at once."""

    def __init__(self, address: tuple[str, int], listener: Listener) -> None:
        self.listener = listener
        self.free = BoundedSemaphore(_AT_ONCE)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.free.acquire(timeout=_SECONDS):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # The socket's own timeout begins anew with every byte.
        end = Timer(self.patience, _cut_off, [request])
        end.daemon = True
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self.free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a request ended early", exc_info=True)


def _cut_off(request: socket.socket) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SECONDS
    protocol_version = "HTTP/1.0"
    server_version = "ckpt"
    sys_version = ""

    def do_POST(self) -> None:
        self._end(self._status())

    def do_GET(self) -> None:
        # For whoever checks that the process is alive; it says nothing.
        self._end(204 if self.path == "/healthz" else 405)

    def _status(self) -> int:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            return 411
        if len(length) > 9 or int(length) > LIMIT:
            return 413
        body = self.rfile.read(int(length))
        if len(body) != int(length):
            return 400
        try:
            return self.server.listener.answer(self.headers.get("Authorization", ""), body)
        except UsageError as error:
            _log.warning("%s", error)
            return 400

    def _end(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug("%s", args)
