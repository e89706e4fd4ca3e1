"""HTTP with kept connections, for object stores: bodies sent from and read into the caller's memory.

A `HttpClient` is used by many threads at once; each request has a connection of its own while it runs. It
does one attempt: `dcp.storage.faults.retrying` repeats. What goes wrong on the way is raised as `OSError`
or `http.client.HTTPException`, an answer of 400 or more as `HttpStatusError`.
"""

from __future__ import annotations

import json
import os
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlencode, urlsplit

TIMEOUT = 60.0
"""Seconds without a byte after which a connection is given up."""

_IDLE = 20.0
"""Seconds after which a connection at rest is not trusted to be open any more."""
_BLOCK = 1 << 20

Body = Sequence[bytes | memoryview]
"""Pieces sent one behind another. They are not consumed, so that a request can be repeated."""


class HttpStatusError(Exception):
    """An answer that says no."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status} {message}".strip())
        self.status = status


@dataclass(slots=True)
class _Kept:
    connection: HTTPConnection
    since: float


class HttpClient:
    """Talks to one endpoint."""

    def __init__(
        self, endpoint: str, headers: Callable[[], Mapping[str, str]], timeout: float = TIMEOUT
    ) -> None:
        """
        Args:
            endpoint: ``http://host:port`` or ``https://host``.
            headers: asked for what to send with every request, credentials above all.
            timeout: seconds without a byte.
        """
        parts = urlsplit(endpoint)
        self._secure = parts.scheme == "https"
        self._host = parts.netloc
        self._base = parts.path.rstrip("/")
        self._headers = headers
        self._timeout = timeout
        self._kept: deque[_Kept] = deque()
        self._process = os.getpid()

    def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        *,
        body: Body | None = None,
        content_type: str | None = None,
    ) -> Any:
        """One request; the JSON of its answer, None where that is empty."""
        headers = {}
        if body is not None:
            headers["Content-Length"] = str(sum(len(piece) for piece in body))
        if content_type is not None:
            headers["Content-Type"] = content_type
        with self._exchange(method, path, query, headers, body) as response:
            data = response.read()
        return json.loads(data) if data else None

    def read(self, path: str, query: Mapping[str, str], start: int, end: int) -> bytes:
        """Bytes ``start <= i < end`` of an object, fewer where it ends earlier."""
        with self._range(path, query, start, end - start) as response:
            return response.read() if response is not None else b""

    def fill(self, path: str, query: Mapping[str, str], start: int, views: Sequence[memoryview]) -> int:
        """Fill ``views`` with the bytes from ``start`` on; says how many there were."""
        with self._range(path, query, start, sum(len(view) for view in views)) as response:
            if response is None:
                return 0
            length = response.length or 0
            got = _fill(response, views, length)
            if got < length:
                raise ConnectionResetError(f"the connection ended after {got} of {length} bytes")
            return got

    @contextmanager
    def _range(
        self, path: str, query: Mapping[str, str], start: int, wanted: int
    ) -> Iterator[HTTPResponse | None]:
        """The answer to a request for a range, never longer than that; None where the object ends before."""
        # Stored bytes are wanted as they are: without this, GCS unpacks what was uploaded gzipped.
        headers = {"Range": f"bytes={start}-{start + wanted - 1}", "Accept-Encoding": "gzip"}
        try:
            with self._exchange("GET", path, query, headers, None) as response:
                if response.status != 206 or response.length is None or response.length > wanted:
                    raise HttpStatusError(response.status, f"is no answer to a request for {wanted} bytes")
                yield response
        except HttpStatusError as error:
            if error.status != 416:
                raise
            yield None

    @contextmanager
    def _exchange(
        self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], body: Body | None
    ) -> Iterator[HTTPResponse]:
        target = f"{self._base}{path}" + (f"?{urlencode(query)}" if query else "")
        connection = self._connection()
        whole = False
        try:
            sent = None if body is None else iter(body)
            connection.request(method, target, body=sent, headers={**self._headers(), **headers})
            response = connection.getresponse()
            if response.status >= 400:
                message = _message(response.read())
                whole = response.isclosed() and not response.will_close
                raise HttpStatusError(response.status, message)
            yield response
            whole = response.isclosed() and not response.will_close
        finally:
            if whole:
                self._kept.append(_Kept(connection, time.monotonic()))
            else:
                connection.close()

    def _connection(self) -> HTTPConnection:
        if self._process != os.getpid():
            # A fork shares its parent's sockets; to use one would mix up their answers.
            self._kept, self._process = deque(), os.getpid()
        while self._kept:
            try:
                kept = self._kept.pop()
            except IndexError:
                break
            if time.monotonic() - kept.since < _IDLE:
                return kept.connection
            kept.connection.close()
        if self._secure:
            return HTTPSConnection(self._host, timeout=self._timeout, blocksize=_BLOCK, context=_trust())
        return HTTPConnection(self._host, timeout=self._timeout, blocksize=_BLOCK)


@cache
def _trust() -> ssl.SSLContext:
    return ssl.create_default_context()


def _fill(response: HTTPResponse, views: Sequence[memoryview], length: int) -> int:
    total = 0
    for view in views:
        at = 0
        while at < len(view) and total < length:
            count = response.readinto(view[at:])
            if not count:
                return total
            at += count
            total += count
    return total


def _message(body: bytes) -> str:
    """What an error's body says, in one line."""
    text = body.decode(errors="replace").strip()
    try:
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(text.split())[:200]
