"""Files that are still being written: hidden beside their target, locked while their writer lives.

A writer that is killed cannot remove its file. Whoever writes to the same place next asks the kernel
whether anybody holds the lock, and removes what nobody does. Where the lock of another machine cannot be
trusted to be seen, on some network filesystems, its files must be a day old as well.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import socket
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from dcp.errors import ForbiddenError, UsageError

TEMPORARY = ".partial-"
"""Marks names of files that are still being written; listings leave them out."""

FOREIGN_SECONDS = 86400.0
"""How long a file of another machine must have rested before it is taken for abandoned."""

_LONGEST = 100
"""Bytes of the target's name in the file's."""
_MARK = re.compile(re.escape(TEMPORARY) + r"(?P<machine>[0-9a-f]{8})-[0-9a-f]{32}")


@contextmanager
def partial_file(path: Path) -> Iterator[tuple[Path, IO[bytes]]]:
    """A new locked file beside ``path``, and its name; closed and, if it is still there, removed afterwards.

    The lock lasts until the file is closed, so whatever moves it to its place must happen within.
    """
    make_directory(path.parent)
    # Ctrl-C may come at any moment: a file has its name here before it is made.
    names: list[Path] = []
    try:
        with _told_apart(path.parent, "file"):
            file = _locked(path, names)
        with file:
            yield names[-1], file
    finally:
        for name in names:
            with suppress(OSError):
                name.unlink(missing_ok=True)


def make_directory(directory: Path) -> None:
    """A durable directory, and those above it, where there is none."""
    while not directory.is_dir():
        make_directory(directory.parent)
        with _told_apart(directory.parent, "directory"):
            try:
                directory.mkdir()
                sync_directory(directory.parent)
            except FileExistsError:
                if _in_the_way(directory):
                    raise
            except FileNotFoundError:
                if directory.parent.is_dir():
                    raise


def _in_the_way(path: Path) -> bool:
    """Whether something else has a directory's name; one that came, and may have gone again, has not."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    return not (stat.S_ISDIR(mode) or path.is_dir())


@contextmanager
def _told_apart(directory: Path, what: str) -> Iterator[None]:
    """The kernel's words for what cannot be made in ``directory`` are those for other things too."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(
            f"{error.filename} is a file: name a directory, or what does not exist yet"
        ) from error
    except FileNotFoundError as error:
        # As /proc has it, where nothing can be made.
        if directory.is_dir():
            raise ForbiddenError(f"no {what} can be made in {directory}", str(directory)) from error
        raise


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(directory: Path, target: str | None = None) -> None:
    """Remove what dead writers left in a directory.

    Args:
        directory: it need not exist.
        target: look only at what was to become this file.
    """
    start = None if target is None else _start(target)
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            position = entry.name.rfind(TEMPORARY)
            mark = _MARK.fullmatch(entry.name, position) if position > 0 else None
            if mark is not None and entry.name[:position] == (start or entry.name[:position]):
                # What cannot be opened or removed is somebody else's, or has just been finished.
                with suppress(OSError):
                    _remove_if_dead(Path(entry.path), mark["machine"])


def _remove_if_dead(path: Path, machine: str) -> None:
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(handle)
        if machine == _machine() or time.time() - status.st_mtime > FOREIGN_SECONDS:
            path.unlink()
    finally:
        os.close(handle)


def _locked(path: Path, names: list[Path]) -> IO[bytes]:
    """A new locked file, whose name is the last of ``names``."""
    while True:
        name = path.with_name(f"{_start(path.name)}{TEMPORARY}{_machine()}-{uuid.uuid4().hex}")
        names.append(name)
        # Unbuffered: callers hand over large pieces, and a copy of each would cost a pass over the data.
        file: IO[Any] = name.open("xb", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = os.fstat(file.fileno()).st_nlink == 0
        except BlockingIOError:
            taken = True
        except OSError:
            # Where there are no locks nobody can find it unlocked either.
            taken = False
        if not taken:
            return file
        # Somebody who swept between the two calls takes it for abandoned.
        name.unlink(missing_ok=True)
        file.close()


def _start(target: str) -> str:
    return "." + os.fsencode(target)[:_LONGEST].decode(errors="ignore")


@cache
def _machine() -> str:
    """Eight digits that are the same for everybody whose locks one kernel keeps."""
    try:
        identity = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        identity = socket.gethostname()
    return hashlib.sha256(identity.encode()).hexdigest()[:8]
