"""A store on Google Cloud Storage, through its JSON API and kept connections.

Credentials are what gcsfs takes and finds, which is imported only where there are any. Objects go up in
one request, or in parts that are composed: parts stand beside their object under hidden names, and are
removed whatever happens. What GCS says that it has, size and CRC-32C, is held against what was sent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from functools import cache
from typing import Any
from urllib.parse import quote, urlsplit

from dcp.errors import (
    AlreadyExistsError,
    DamagedUploadError,
    ForbiddenError,
    NotFoundError,
    StorageError,
    UnreachableError,
    UsageError,
)
from dcp.storage.claims import claim
from dcp.storage.crc32c import crc32c, from_text, joined, to_text
from dcp.storage.faults import retrying, translate
from dcp.storage.http import TIMEOUT, HttpClient
from dcp.storage.store import Held, ObjectInfo, Sink, Store, truncated
from dcp.storage.uploads import Pieces, Upload, is_abandoned, is_partial, require_same, uploading

_KNOWN = {
    *("project", "access", "token", "requester_pays", "endpoint_url", "timeout", "requests_timeout"),
    *("use_listings_cache", "skip_instance_cache", "cache_timeout", "block_size", "consistency"),
    *("default_location", "secure_serialize"),
}
"""Options of gcsfs that mean something here, or that say nothing of how objects are read and written."""
_COMPOSED = 32
"""Most objects that GCS composes in one request."""
_DATA = "application/octet-stream"


def understands(options: Mapping[str, Any]) -> bool:
    """Whether `GcsStore` does all that these options of gcsfs ask for."""
    return options.keys() <= _KNOWN and os.environ.get("GOOGLE_API_USE_CLIENT_CERTIFICATE") != "true"


class GcsStore(Store):
    """A prefix in a bucket."""

    def __init__(self, url: str, options: Mapping[str, Any], client: HttpClient | None = None) -> None:
        self.url = url
        self.options = options
        self.bucket, _, self.root = url.partition("://")[2].partition("/")
        self._client = client or _client(url, options)
        self._query = _billing(options)

    def child(self, name: str) -> GcsStore:
        self.key(name)
        return GcsStore(f"{self.url}/{name.strip('/')}", self.options, self._client)

    def key(self, name: str) -> str:
        """The object's name in its bucket."""
        if name.startswith("/") or ".." in name.split("/"):
            raise UsageError(f"{name!r} leads outside {self.url}")
        return f"{self.root}/{name}" if self.root else name

    def objects(self) -> list[ObjectInfo]:
        found = [
            self._object(item)
            for page in self.pages({"prefix": self.key("")})
            for item in page.get("items", ())
            # Consoles leave zero-byte "directory" objects behind.
            if not item["name"].endswith("/") and not is_partial(item["name"])
        ]
        if not found:
            raise NotFoundError(f"nothing at {self.url}", self.url)
        return sorted(found, key=lambda item: item.name)

    def directories(self) -> list[str]:
        pages = list(self.pages({"prefix": self.key(""), "delimiter": "/"}))
        names = {self._name(prefix).strip("/") for page in pages for prefix in page.get("prefixes", ())}
        if not names and not any(page.get("items") for page in pages):
            raise NotFoundError(f"nothing at {self.url}", self.url)
        return sorted(name for name in names if name)

    def pages(self, query: Mapping[str, str]) -> Iterator[Mapping[str, Any]]:
        """A listing of the bucket, page by page."""
        fields = "items(name,size,updated,generation,crc32c),prefixes,nextPageToken"
        query = {**query, "fields": fields}
        while True:
            try:
                page = self.call("GET", f"/storage/v1/b/{self.bucket}/o", query, url=self.url) or {}
            except NotFoundError:
                raise UnreachableError(
                    f"the bucket of {self.url} does not exist or is not visible", self.url
                ) from None
            yield page
            if not page.get("nextPageToken"):
                return
            query = {**query, "pageToken": page["nextPageToken"]}

    def info(self, name: str) -> ObjectInfo:
        return self._object(self.call("GET", self.path(self.key(name)), {}, url=f"{self.url}/{name}"))

    def _name(self, key: str) -> str:
        return key[len(self.root) :].removeprefix("/") if self.root else key

    def _object(self, item: Mapping[str, Any]) -> ObjectInfo:
        checksum = item.get("crc32c")
        return ObjectInfo(
            self._name(item["name"]),
            int(item["size"]),
            datetime.fromisoformat(item["updated"]).timestamp() if "updated" in item else None,
            str(item["generation"]),
            from_text(checksum) if checksum else None,
        )

    def read_range(self, name: str, start: int, end: int) -> bytes:
        if end <= start:
            return b""
        query = {"alt": "media", **self._query}
        path = self.path(self.key(name))
        data = retrying(f"{self.url}/{name}", self._client.read, path, query, start, end)
        if len(data) < end - start:
            raise truncated(name, start, end, len(data))
        return data

    def read_into(self, name: str, start: int, views: Sequence[memoryview]) -> None:
        wanted = sum(len(view) for view in views)
        if not wanted:
            return
        query = {"alt": "media", **self._query}
        path = self.path(self.key(name))
        got = retrying(f"{self.url}/{name}", self._client.fill, path, query, start, views)
        if got < wanted:
            raise truncated(name, start, start + wanted, got)

    def create(self, name: str, data: bytes) -> None:
        url = f"{self.url}/{name}"
        doubtful = False

        def attempt() -> None:
            nonlocal doubtful
            try:
                self._put(name, data, {"ifGenerationMatch": "0"})
            # Whatever it is, it is translated; the request may have been carried out all the same.
            except Exception as error:
                translated = translate(error, url)
                if isinstance(translated, AlreadyExistsError) and doubtful:
                    found = self.info(name)
                    if (found.size, found.crc32c) == (len(data), f"{crc32c(data):08x}"):
                        return
                doubtful = doubtful or isinstance(translated, UnreachableError)
                raise

        retrying(url, attempt)

    def replace(self, name: str, data: bytes) -> None:
        retrying(f"{self.url}/{name}", self._put, name, data, {})

    def _put(self, name: str, data: bytes, query: Mapping[str, str]) -> None:
        """A small object with its checksum, which GCS itself holds against the bytes."""
        border = os.urandom(16).hex()
        resource = {"name": self.key(name), "crc32c": to_text(crc32c(data))}
        head = (
            f"--{border}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(resource)}\r\n"
            f"--{border}\r\nContent-Type: {_DATA}\r\n\r\n"
        )
        answer = self._client.call(
            "POST",
            f"/upload/storage/v1/b/{self.bucket}/o",
            {"uploadType": "multipart", **query, **self._query},
            body=[head.encode(), data, f"\r\n--{border}--\r\n".encode()],
            content_type=f"multipart/related; boundary={border}",
        )
        _require_stored(f"{self.url}/{name}", answer, crc32c(data), len(data))

    def writer(self, name: str) -> AbstractContextManager[Sink]:
        folder, _, last = self.key(name).rpartition("/")
        # Who may write need not be allowed to list.
        with suppress(ForbiddenError):
            self._sweep(f"{folder}/.{last}" if folder else f".{last}")
        return uploading(_GcsUpload(self, name))

    def claimed(self, name: str) -> AbstractContextManager[Held]:
        return claim(self.child(name))

    def unfinished(self) -> Iterator[tuple[str, float | None]]:
        for page in self.pages({"prefix": self.key("."), "delimiter": "/"}):
            for found in map(self._object, page.get("items", ())):
                if is_partial(found.name):
                    yield found.name, found.modified

    def sweep(self) -> None:
        self._sweep(self.key(""), delimiter="/")

    def _sweep(self, prefix: str, **query: str) -> None:
        for page in self.pages({"prefix": prefix, **query}):
            for item in page.get("items", ()):
                found = self._object(item)
                if is_partial(item["name"]) and is_abandoned(item["name"], found.modified):
                    self.delete(item["name"])

    def remove(self, name: str) -> None:
        self.delete(self.key(name))

    def delete(self, key: str) -> None:
        """Delete an object by its name in the bucket."""
        with suppress(NotFoundError):
            self.call("DELETE", self.path(key), {}, url=f"gs://{self.bucket}/{key}")

    def path(self, key: str) -> str:
        """An object's place in the API."""
        return f"/storage/v1/b/{self.bucket}/o/{quote(key, safe='')}"

    def call(self, method: str, path: str, query: Mapping[str, str], *, url: str, **options: Any) -> Any:
        """One request, repeated within bounds, that may be repeated without harm."""
        return retrying(url, self._client.call, method, path, {**query, **self._query}, **options)


class _GcsUpload(Upload):
    def __init__(self, store: GcsStore, name: str) -> None:
        super().__init__()
        self._store = store
        self._url = f"{store.url}/{name}"
        self._key = store.key(name)
        folder, _, last = self._key.rpartition("/")
        self._stem = f"{folder}/.{last}{self.mark}" if folder else f".{last}{self.mark}"
        self._parts: dict[int, tuple[int, int]] = {}
        self._stored: set[str] = set()
        """Names of parts, and of what was composed of them, that may be there."""

    def whole(self, pieces: Pieces) -> None:
        checksum = size = 0
        for piece in pieces:
            checksum, size = crc32c(piece, checksum), size + len(piece)
        self._send(self._key, pieces, checksum, size)

    def part(self, number: int, data: memoryview) -> None:
        checksum = crc32c(data)
        self._stored.add(self._part(number))
        self._send(self._part(number), [data], checksum, len(data))
        self._parts[number] = (checksum, len(data))

    def complete(self) -> None:
        sources = [self._part(number) for number in range(len(self._parts))]
        level = 0
        while len(sources) > _COMPOSED:
            level += 1
            groups = [sources[at : at + _COMPOSED] for at in range(0, len(sources), _COMPOSED)]
            sources = [f"{self._stem}-{level}-{number:05}" for number in range(len(groups))]
            self._stored.update(sources)
            for name, group in zip(sources, groups, strict=True):
                self._compose(name, group)
        answer = self._compose(self._key, sources)
        self._require(self._key, answer, *joined(self._parts[number] for number in range(len(self._parts))))
        # The object is there and whole: parts that cannot be removed now are swept by the next writer.
        with suppress(StorageError):
            self.abort()

    def abort(self) -> None:
        with ThreadPoolExecutor(8, thread_name_prefix="remove") as pool:
            for _ in pool.map(self._store.delete, sorted(self._stored)):
                pass

    def _part(self, number: int) -> str:
        return f"{self._stem}-0-{number:05}"

    def _send(self, key: str, pieces: Pieces, checksum: int, size: int) -> None:
        query = {"uploadType": "media", "name": key}
        path = f"/upload/storage/v1/b/{self._store.bucket}/o"
        answer = self._store.call("POST", path, query, url=self._url, body=pieces, content_type=_DATA)
        self._require(key, answer, checksum, size)

    def _compose(self, key: str, sources: Sequence[str]) -> Any:
        body = {"sourceObjects": [{"name": name} for name in sources], "destination": {"contentType": _DATA}}
        path = f"{self._store.path(key)}/compose"
        data = [json.dumps(body).encode()]
        return self._store.call("POST", path, {}, url=self._url, body=data, content_type="application/json")

    def _require(self, key: str, answer: Mapping[str, Any], checksum: int, size: int) -> None:
        """What is stored must be what was sent; if it is not, nobody may find it under the object's name."""
        try:
            _require_stored(self._url, answer, checksum, size)
        except DamagedUploadError:
            self._store.delete(key)
            raise


def _require_stored(url: str, answer: Mapping[str, Any], checksum: int, size: int) -> None:
    require_same(url, "a size of", size, int(answer["size"]))
    if "crc32c" in answer:
        require_same(url, "the CRC-32C", f"{checksum:08x}", from_text(answer["crc32c"]))


def _billing(options: Mapping[str, Any]) -> dict[str, str]:
    payer = options.get("requester_pays")
    if not payer:
        return {}
    project = payer if isinstance(payer, str) else options.get("project")
    if not project:
        raise UsageError('requester_pays needs a project to bill: requester_pays = "PROJECT"')
    return {"userProject": str(project)}


def _client(url: str, options: Mapping[str, Any]) -> HttpClient:
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "").removesuffix("/")
    if emulator and "://" not in emulator:
        emulator = f"http://{emulator}"
    universe = os.environ.get("GOOGLE_CLOUD_UNIVERSE_DOMAIN") or "googleapis.com"
    google = f"https://storage.{universe}"
    endpoint = str(options.get("endpoint_url") or (emulator if emulator != "default" else "") or google)
    if urlsplit(endpoint).scheme not in ("http", "https"):
        raise UsageError(f"{endpoint} is no endpoint for {url}; write http://HOST:PORT or https://HOST")
    timeout = float(options.get("requests_timeout") or TIMEOUT)
    token = options.get("token")
    if token == "anon" or (token is None and endpoint != google):
        return _anonymous(endpoint, timeout)
    project, access = options.get("project"), options.get("access", "full_control")
    if token is None or isinstance(token, str):
        return _authorised(endpoint, project, access, token, timeout)
    return HttpClient(endpoint, _credentials(project, access, token), timeout)


@cache
def _anonymous(endpoint: str, timeout: float) -> HttpClient:
    return HttpClient(endpoint, dict, timeout)


@cache
def _authorised(endpoint: str, project: Any, access: str, token: str | None, timeout: float) -> HttpClient:
    return HttpClient(endpoint, _credentials(project, access, token), timeout)


def _credentials(project: Any, access: str, token: Any) -> Callable[[], Mapping[str, str]]:
    from gcsfs.credentials import GoogleCredentials

    found = GoogleCredentials(project, access, token)

    def headers() -> Mapping[str, str]:
        given: dict[str, str] = {}
        found.apply(given)
        return given

    return headers
