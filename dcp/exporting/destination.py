"""Where an export goes: looked at before anything is read, with `--plan` too."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dcp.errors import ForbiddenError, NotFoundError, UsageError
from dcp.storage import Store, normalise_url, open_parent
from dcp.storage.partial import TEMPORARY
from dcp.storage.urls import split_protocol

_READ_ONLY = {"http", "https", "github", "gist", "git", "data", "zip", "tar", "libarchive", "reference"}
_NAMELESS = getattr(os, "O_TMPFILE", 0)
"""Linux alone has it. Without it the directory itself is opened, which is refused as no nameless file is."""
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}
"""How filesystems say that they have no nameless files."""


def open_destination(dest: str, options: Mapping[str, Any], *, directory: bool) -> tuple[Store, str]:
    """The store that ``dest`` lies in, and its name there.

    Args:
        options: passed to the filesystem.
        directory: whether several files will stand in ``dest``.

    Raises:
        UsageError: nothing can be written there, or a directory stands where a file should.
        ForbiddenError: nothing may be written there.
    """
    protocol, _ = split_protocol(dest)
    if protocol in _READ_ONLY:
        raise UsageError(f"{dest} cannot be written to; use a path, gs:// or s3://")
    store, name = open_parent(dest, **options)
    if protocol == "file":
        _require_writable(Path(normalise_url(dest)), directory)
    elif protocol != "memory" and not directory and _is_prefix(store, name):
        raise UsageError(f"{dest} is a directory; name a file in it, or another one")
    return store, name


def _require_writable(path: Path, directory: bool) -> None:
    """Make a file without a name where the first of the output will be made."""
    place = Path(os.path.realpath(path))
    place = place if directory else place.parent
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise UsageError(f"{place} is a file: name a directory, or what does not exist yet")
    try:
        try:
            os.close(os.open(place, _NAMELESS | os.O_WRONLY))
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            with tempfile.NamedTemporaryFile(dir=place, prefix=f".export{TEMPORARY}"):
                return
    except OSError as error:
        # Room is looked at elsewhere.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            why = (error.strerror or str(error)).lower()
            raise ForbiddenError(f"nothing can be written in {place}: {why}", str(place)) from error


def _is_prefix(store: Store, name: str) -> bool:
    """Whether there are objects below ``name``, and none of that name itself."""
    # Who may write need not be allowed to list.
    with suppress(NotFoundError, ForbiddenError):
        store.child(name).directories()
        return not store.exists(name)
    return False
