"""Text from a bucket or a service, made fit for records and for people's terminals."""

from __future__ import annotations

import shlex
from typing import Any


def plain(text: str, limit: int = 1000) -> str:
    """Text made harmless: one line, printable, bounded."""
    line = " ".join(text.split())
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def typed(*words: object) -> str:
    """A command as it is typed in a shell, whatever is in the names of places."""
    return shlex.join(str(word) for word in words)


def writable(text: str) -> str:
    """Text that can be written as UTF-8: bytes of a file's name that are none appear as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def writable_facts(value: Any) -> Any:
    """The same of all text in a JSON-able value."""
    match value:
        case str():
            return writable(value)
        case dict():
            return {writable_facts(key): writable_facts(each) for key, each in value.items()}
        case list() | tuple():
            return [writable_facts(each) for each in value]
    return value
