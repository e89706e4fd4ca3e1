"""A store on a local filesystem: positioned reads, conditional creation by link, atomic appearance."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from dcp.errors import BusyError, NotFoundError, StorageError, UsageError
from dcp.storage.faults import calling, translate
from dcp.storage.partial import TEMPORARY, make_directory, partial_file, sweep, sync_directory
from dcp.storage.store import Held, ObjectInfo, Sink, Store, truncated


class LocalStore(Store):
    """A directory. Temporary files of unfinished writes stand beside their target, hidden from `objects`."""

    holds_writers = True

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.url = url
        self.options = options
        self.root = Path(url)

    def child(self, name: str) -> LocalStore:
        return LocalStore(str(self._path(name)), self.options)

    def _path(self, name: str) -> Path:
        if name.startswith("/") or ".." in name.split("/") or "\0" in name:
            raise UsageError(f"{name!r} leads outside {self.url}")
        return self.root / name

    def objects(self) -> list[ObjectInfo]:
        found = calling(self.url, lambda: list(self._scan(self.root, "")))
        return sorted(found, key=lambda item: item.name)

    def _scan(self, directory: Path, prefix: str) -> Iterator[ObjectInfo]:
        with os.scandir(directory) as entries:
            for entry in entries:
                # Another process may move things away while we look; what is gone was not there. Nor is
                # what a link promises that leads nowhere.
                with suppress(FileNotFoundError), _leading_somewhere():
                    if entry.is_dir():
                        yield from self._scan(Path(entry.path), f"{prefix}{entry.name}/")
                    elif TEMPORARY not in entry.name:
                        yield _info(f"{prefix}{entry.name}", entry.stat())

    def directories(self) -> list[str]:
        def scan() -> list[str]:
            found = []
            with os.scandir(self.root) as entries:
                for entry in entries:
                    with _leading_somewhere():
                        if entry.is_dir():
                            found.append(entry.name)
            return sorted(found)

        return calling(self.url, scan)

    def info(self, name: str) -> ObjectInfo:
        path = self._path(name)
        status = calling(str(path), path.stat)
        if stat.S_ISDIR(status.st_mode):
            raise NotFoundError(f"{path} is a directory, not an object", str(path))
        return _info(name, status)

    def read_range(self, name: str, start: int, end: int) -> bytes:
        path = self._path(name)
        return calling(str(path), self._pread, path, name, start, end)

    @staticmethod
    def _pread(path: Path, name: str, start: int, end: int) -> bytes:
        handle = os.open(path, os.O_RDONLY)
        try:
            # The size in the request may come from a hostile index: never allocate beyond the file.
            size = os.fstat(handle).st_size
            if end > size:
                raise truncated(name, start, end, max(0, size - start))
            data = os.pread(handle, end - start, start)
            if len(data) == end - start:
                return data
            parts = [data]
            got = len(data)
            while got < end - start:
                part = os.pread(handle, end - start - got, start + got)
                if not part:
                    raise truncated(name, start, end, got)
                parts.append(part)
                got += len(part)
            return b"".join(parts)
        finally:
            os.close(handle)

    def read_into(self, name: str, start: int, views: Sequence[memoryview]) -> None:
        path = self._path(name)
        calling(str(path), self._preadv, path, name, start, views)

    @staticmethod
    def _preadv(path: Path, name: str, start: int, views: Sequence[memoryview]) -> None:
        handle = os.open(path, os.O_RDONLY)
        try:
            wanted = sum(len(view) for view in views)
            got = os.preadv(handle, views, start)
            while got < wanted:
                more = os.preadv(handle, _after(views, got), start + got)
                if not more:
                    raise truncated(name, start, start + wanted, got)
                got += more
        finally:
            os.close(handle)

    def create(self, name: str, data: bytes) -> None:
        path = self._path(name)

        def link() -> None:
            with self._written(path, data) as temporary:
                os.link(temporary, path)

        calling(str(path), link)

    def replace(self, name: str, data: bytes) -> None:
        path = self._path(name)

        def rename() -> None:
            with self._written(path, data) as temporary:
                temporary.replace(path)

        calling(str(path), rename)

    @contextmanager
    def _written(self, path: Path, data: bytes) -> Iterator[Path]:
        """``data`` in a durable temporary file beside ``path``, gone when the block ends."""
        with partial_file(path) as (temporary, file):
            _LocalSink(file).write(data)
            _flush(file)
            yield temporary
            sync_directory(path.parent)

    @contextmanager
    def writer(self, name: str) -> Iterator[Sink]:
        # A link is written through, as any program does: what it leads to is replaced, not the link.
        path = Path(os.path.realpath(self._path(name)))
        if path.is_dir():
            raise UsageError(f"{path} is a directory; name a file")
        if path.exists() and not path.is_file():
            # The rename at the end would put a plain file in the place of a device.
            raise UsageError(f"{path} is a device or a pipe; name a file")
        sweep(path.parent, path.name)
        try:
            with partial_file(path) as (temporary, file):
                yield _LocalSink(file)
                _flush(file)
                temporary.replace(path)
                sync_directory(path.parent)
        except StorageError:
            # Of another file that is being written meanwhile.
            raise
        except OSError as error:
            raise translate(error, str(path)) from error

    @contextmanager
    def claimed(self, name: str) -> Iterator[Held]:
        """The directory is made, and locked; if nothing is in it in the end it goes again."""
        path = self._path(name)
        made = not path.is_dir()
        handle = -1
        try:
            try:
                handle, again = _locked(path)
                made = made or again
            except BusyError:
                made = False
                raise
            except OSError as error:
                raise translate(error, str(path)) from error
            yield lambda: None
        finally:
            if made:
                # It stays where anything has been put into it.
                with suppress(OSError):
                    path.rmdir()
            if handle >= 0:
                os.close(handle)

    def sweep(self) -> None:
        sweep(self.root)

    def remove(self, name: str) -> None:
        path = self._path(name)
        calling(str(path), path.unlink, missing_ok=True)

    def prune(self) -> None:
        for directory, _, _ in os.walk(self.root, topdown=False):
            # One that is not empty, or that somebody else removed, is left as it is.
            with suppress(OSError):
                Path(directory).rmdir()


def _locked(path: Path) -> tuple[int, bool]:
    """A handle on a directory that holds its lock, and whether the directory had to be made."""
    while True:
        made = not path.is_dir()
        make_directory(path)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            _lock(handle, path)
            # Who had it before may have removed it since it was opened.
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle, made
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int, path: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BusyError(f"somebody else is writing to {path}", str(path)) from None
    except OSError:
        # Where there are no locks, as on some network filesystems, nobody is kept out.
        return


@contextmanager
def _leading_somewhere() -> Iterator[None]:
    """A link in a circle counts as one that leads nowhere."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise


class _LocalSink:
    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, data: bytes | bytearray | memoryview, /) -> int:
        view = memoryview(data).cast("B")
        total = len(view)
        while view:
            view = view[self.file.write(view) :]
        return total


def _after(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of ``views`` when their first ``done`` bytes are filled."""
    left: list[memoryview] = []
    for view in views:
        if done < len(view):
            left.append(view[done:])
        done = max(0, done - len(view))
    return left


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _info(name: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(name, status.st_size, status.st_mtime, f"{status.st_mtime_ns}")
