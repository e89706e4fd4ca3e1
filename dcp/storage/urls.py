"""URLs and object names as text. A URL is not a path: ``pathlib`` would fold its double slash.

A *name* is relative to a store's prefix, with ``/`` between parts. Names read from a checkpoint are
hostile until `is_safe_name` has passed them.
"""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path

from dcp.errors import UsageError

_MAX_NAME_BYTES = 1024


def split_protocol(url: str) -> tuple[str, str]:
    """``("gs", "bucket/key")`` for ``gs://bucket/key``; protocol ``"file"`` for local paths."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return "file", url
    if scheme in ("file", "local"):
        return "file", rest
    return scheme.lower(), rest


def normalise_url(url: str | PathLike[str]) -> str:
    """One spelling a location: local paths absolute, URLs without a trailing slash.

    Args:
        url: a path of `pathlib` is a local one.

    Raises:
        UsageError: the URL is empty, names no bucket, or is neither text nor a path.
    """
    try:
        url = os.fsdecode(url)
    except TypeError:
        raise UsageError(f"a location is text or a path, not {url!r}") from None
    protocol, rest = split_protocol(url)
    if "\0" in url:
        raise UsageError("a location must not contain a NUL character")
    if protocol == "file":
        if not rest:
            raise UsageError(
                "an empty path is no location; give a directory or a URL such as gs://bucket/run"
            )
        return str(home_expanded(rest).absolute())
    rest = rest.strip("/")
    if not rest:
        raise UsageError(f"{url!r} names no bucket; write {protocol}://bucket/prefix")
    return f"{protocol}://{rest}"


def home_expanded(path: str | Path) -> Path:
    """A local path with ``~`` and ``~user`` replaced.

    Raises:
        UsageError: there is no such user, or nobody's home is known.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(
            f"{path}: no home directory is known for {Path(path).parts[0]}; for a file of that name write "
            f"./{path}"
        ) from None


def join_url(url: str, *names: str) -> str:
    """The location of ``names`` below ``url``."""
    return "/".join([url.rstrip("/") if url != "/" else "", *(n.strip("/") for n in names)])


def split_url(url: str) -> tuple[str, str]:
    """Parent location and last name of a location: ``("gs://b/run", "step_1")`` for ``gs://b/run/step_1``."""
    parent, _, name = normalise_url(url).rpartition("/")
    if not name or parent.endswith((":/", ":")):
        raise UsageError(f"{url!r} has no parent; name an object or directory inside it")
    return parent or "/", name


def is_safe_name(name: str) -> bool:
    """Whether a name read from a checkpoint stays inside the checkpoint's own prefix."""
    if not name or len(name.encode("utf-8", "surrogatepass")) > _MAX_NAME_BYTES:
        return False
    if any(ord(c) < 32 or 0xD800 <= ord(c) <= 0xDFFF for c in name) or "\\" in name or "://" in name:
        return False
    return all(part not in ("", ".", "..") for part in name.split("/"))
