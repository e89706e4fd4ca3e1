"""A store on any fsspec filesystem: memory, and the base of S3's.

Listings are never cached, because another machine writes what we look for. Small conditional writes go
through ``pipe_file(mode="create")``, which GCS, S3 and memory honour; streamed writes become visible
when they are closed and are discarded when the block raises.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from typing import Any, NoReturn

from dcp.errors import NotFoundError, UnreachableError, UsageError
from dcp.storage.claims import claim
from dcp.storage.faults import calling, retrying, status_of, translate
from dcp.storage.store import Held, ObjectInfo, Sink, Store, truncated
from dcp.storage.uploads import is_partial

BLOCK = 64 << 20
"""Bytes of one upload request: small ones are slow on every object store."""


class RemoteStore(Store):
    """A prefix in a bucket."""

    def __init__(self, url: str, filesystem: Any, options: Mapping[str, Any]) -> None:
        self.url = url
        self.options = options
        self.filesystem = filesystem
        self.root = filesystem._strip_protocol(url).rstrip("/")

    def child(self, name: str) -> RemoteStore:
        self._path(name)
        return RemoteStore(f"{self.url}/{name.strip('/')}", self.filesystem, self.options)

    def _path(self, name: str) -> str:
        if name.startswith("/") or ".." in name.split("/"):
            raise UsageError(f"{name!r} leads outside {self.url}")
        return f"{self.root}/{name}"

    def _name(self, path: str) -> str:
        return path[len(self.root) :].strip("/") if path.startswith(self.root) else path

    def objects(self) -> list[ObjectInfo]:
        found = self._listing(self.filesystem.find, detail=True, withdirs=False)
        objects = [
            self._object(self._name(path), entry)
            for path, entry in found.items()
            # Consoles leave zero-byte "directory" objects behind.
            if entry.get("type") != "directory"
            and not path.endswith("/")
            and path.rstrip("/") != self.root
            and not is_partial(path)
        ]
        if not objects:
            self._raise_absent()
        return sorted(objects, key=lambda item: item.name)

    def directories(self) -> list[str]:
        entries = self._listing(self.filesystem.ls, detail=True)
        names = (self._name(entry["name"]) for entry in entries if entry["type"] == "directory")
        return sorted(name for name in names if name)

    def _listing(self, verb: Callable[..., Any], **options: Any) -> Any:
        try:
            return retrying(self.url, verb, self.root, **options)
        except NotFoundError:
            self._raise_absent()

    def _raise_absent(self) -> NoReturn:
        """Tell an absent prefix from an absent bucket: backends answer both alike."""
        bucket = self.root.strip("/").split("/")[0]
        if not retrying(self.url, self._bucket_exists, bucket):
            raise UnreachableError(f"the bucket of {self.url} does not exist or is not visible", self.url)
        raise NotFoundError(f"nothing at {self.url}", self.url)

    def _bucket_exists(self, bucket: str) -> bool:
        try:
            self.filesystem.ls(bucket, detail=False)
        except FileNotFoundError:
            return False
        return True

    def info(self, name: str) -> ObjectInfo:
        entry = retrying(f"{self.url}/{name}", self.filesystem.info, self._path(name))
        if entry["type"] == "directory":
            raise NotFoundError(f"{self.url}/{name} is a prefix, not an object", f"{self.url}/{name}")
        return self._object(name, entry)

    def _object(self, name: str, entry: Mapping[str, Any]) -> ObjectInfo:
        written = next(
            (entry[k] for k in ("mtime", "LastModified", "modified", "created") if entry.get(k)), None
        )
        stamp = written.timestamp() if isinstance(written, datetime) else written
        identity = entry.get("generation") or entry.get("ETag") or entry.get("etag") or stamp
        return ObjectInfo(name, int(entry["size"]), stamp, str(identity))

    def read_range(self, name: str, start: int, end: int) -> bytes:
        if end <= start:
            return b""
        url = f"{self.url}/{name}"
        data: bytes = retrying(url, self._whole, name, start, end)
        if len(data) != end - start:
            raise truncated(name, start, end, len(data))
        return data

    def _whole(self, name: str, start: int, end: int) -> bytes:
        """A range, short only where the object itself ends: an answer may be cut off on its way."""
        data = self._cat(self._path(name), start, end)
        if len(data) < end - start and self._object(name, self.filesystem.info(self._path(name))).size >= end:
            raise UnreachableError(f"{self.url}/{name} was answered with {len(data)} of {end - start} bytes")
        return data

    def _cat(self, path: str, start: int, end: int) -> bytes:
        try:
            data: bytes = self.filesystem.cat_file(path, start=start, end=end)
            return data
        except Exception as error:
            # "range not satisfiable": the object ends before ``start``.
            if status_of(error) == 416 or any(
                text in str(error) for text in ("InvalidRange", "not satisfiable")
            ):
                return b""
            raise

    def create(self, name: str, data: bytes) -> None:
        calling(f"{self.url}/{name}", self.filesystem.pipe_file, self._path(name), data, mode="create")

    def replace(self, name: str, data: bytes) -> None:
        retrying(f"{self.url}/{name}", self.filesystem.pipe_file, self._path(name), data)

    def writer(self, name: str) -> AbstractContextManager[Sink]:
        return self._stream(name)

    @contextmanager
    def _stream(self, name: str) -> Iterator[Sink]:
        url = f"{self.url}/{name}"
        file = calling(url, self.filesystem.open, self._path(name), "wb", block_size=BLOCK)
        try:
            yield file
            file.close()
        except BaseException as error:
            _discard(file)
            if isinstance(error, OSError):
                raise translate(error, url) from error
            raise

    def claimed(self, name: str) -> AbstractContextManager[Held]:
        return claim(self.child(name))

    def unfinished(self) -> Iterator[tuple[str, float | None]]:
        for entry in self._listing(self.filesystem.ls, detail=True):
            if is_partial(entry["name"]):
                found = self._object(self._name(entry["name"]), entry)
                yield found.name, found.modified

    def remove(self, name: str) -> None:
        try:
            retrying(f"{self.url}/{name}", self.filesystem.rm_file, self._path(name))
        except NotFoundError:
            return


class MemoryStore(RemoteStore):
    """fsspec's memory filesystem, whose open files are visible before they are closed."""

    @contextmanager
    def _stream(self, name: str) -> Iterator[Sink]:
        buffer = io.BytesIO()
        yield buffer
        self.replace(name, buffer.getvalue())

    def _bucket_exists(self, bucket: str) -> bool:
        return True


def _discard(file: Any) -> None:
    """End an upload without publishing it, whatever state it is in."""
    try:
        file.discard()
    except Exception:  # noqa: S110 - the first error is the one to report; an open upload expires by itself
        pass
    finally:
        file.closed = True
