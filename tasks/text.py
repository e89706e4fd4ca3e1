"""Text from a bucket or a service, made fit for records and for people's terminals."""

from __future__ import annotations


def plain(text: str, limit: int = 1000) -> str:
    """Text made harmless: one line, printable, bounded."""
    line = " ".join(text.split())
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
