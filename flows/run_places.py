"""Places that a run names in its settings: made absolute, and told apart whatever their spelling."""

from __future__ import annotations

from pathlib import Path

from dcp.storage import home_expanded, normalise_url
from dcp.storage.opening import require_protocol

_ALIASES = {"gcs": "gs", "s3a": "s3"}


def absolute(place: str, folder: Path) -> str:
    """The URL or absolute path of a place; a relative one is taken from ``folder``.

    Raises:
        UsageError: there is no filesystem for it, or no home of the user it names.
    """
    if "://" in place or home_expanded(place).is_absolute():
        require_protocol(place)
        return normalise_url(place)
    return normalise_url(str(folder / place))


def same_place(a: str, b: str) -> bool:
    """Whether two URLs or paths lead to one place."""
    return _spelling(a) == _spelling(b)


def overlap(a: str, b: str) -> bool:
    """Whether two places are one, or one lies in the other."""
    one, other = _spelling(a) + "/", _spelling(b) + "/"
    return one.startswith(other) or other.startswith(one)


def _spelling(url: str) -> str:
    """One spelling a place: protocol aliases folded, symbolic links followed."""
    protocol, mark, rest = url.partition("://")
    if not mark:
        return str(Path(url).resolve()).rstrip("/")
    return f"{_ALIASES.get(protocol, protocol)}://{rest}"
