"""Text for people: names from a bucket made harmless, bytes and times made readable.

Key names, object names and URLs come from whoever can write to a bucket. `inert` lets none of them move
the cursor, change colours, reorder what is read (bidirectional overrides) or break a line. Letters that are
read from right to left are no controls, but draw digits and signs beside them along; `stretches` finds them,
and `anchored` keeps the rest of a terminal's line in its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import isfinite

from dcp.sizes import human_bytes as human_bytes

_LONGEST_NAME = 200
_LEFTWARD = "\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefe\U00010800-\U00010fff\U0001e800-\U0001efff"
_STRETCH = re.compile(f"[{_LEFTWARD}](?:[\\W\\d_]*[{_LEFTWARD}])*")
_LEFT_TO_RIGHT_MARK = "\u200e"
_FAILED = {
    "validate": "validate-failed",
    "test-load": "load-failed",
    "export": "export-failed",
    "publish": "publish-failed",
}


def inert(text: str, limit: int | None = None) -> str:
    """``text`` on one line with everything unprintable as an escape such as ``\\x1b`` or ``\\u202e``.

    Args:
        limit: the most characters to keep; the middle of a longer text becomes ``…``.
    """
    if limit is not None and len(text) > limit:
        text = f"{text[: limit // 2]}…{text[-(limit // 2) :]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def name(text: str, limit: int = _LONGEST_NAME) -> str:
    """A key, object name, URL or message from a bucket: inert and of bounded length."""
    return inert(text, limit) or "''"


def stretches(text: str) -> Iterator[tuple[str, bool]]:
    """``text`` in pieces, and of each whether it is read from right to left."""
    if text.isascii():
        yield text, False
        return
    at = 0
    for found in _STRETCH.finditer(text):
        if found.start() > at:
            yield text[at : found.start()], False
        yield found[0], True
        at = found.end()
    if at < len(text):
        yield text[at:], False


def anchored(text: str) -> str:
    """``text`` for a terminal that orders letters: what stands beside those from right to left stays."""
    mark = _LEFT_TO_RIGHT_MARK
    return "".join(f"{mark}{piece}{mark}" if leftward else piece for piece, leftward in stretches(text))


def _escape(char: str) -> str:
    known = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char)
    if known is not None:
        return known
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def human_seconds(seconds: float) -> str:
    """``35 ms``, ``0.4 s``, ``12 s``, ``3 min 20 s``, ``5 h 2 min``, ``3 d 4 h``, or ``?``."""
    if not isfinite(seconds):
        return "?"
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, part, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"


def human_age(seconds: float) -> str:
    """The largest unit alone: ``45 s``, ``40 min``, ``3 h``, ``12 d``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def plural(count: int, noun: str) -> str:
    """``1 key``, ``2,000 keys``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def problem_name(problem: str) -> str:
    """How a problem is shown: that of a stage must not read as if the stage were at work."""
    return _FAILED.get(problem, problem)
