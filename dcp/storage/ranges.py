"""Byte ranges of objects, and how near ones are joined. Pure values, no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class ByteRange:
    """Bytes ``start <= i < end`` of the object ``name``."""

    name: str
    """Object name relative to the store."""
    start: int
    """First byte."""
    end: int
    """Exclusive end, in bytes."""

    @property
    def length(self) -> int:
        return self.end - self.start


def coalesce(ranges: Iterable[ByteRange], *, gap: int, limit: int) -> list[ByteRange]:
    """Join ranges of one object at most ``gap`` bytes apart into requests of at most ``limit`` bytes.

    A single range longer than ``limit`` stays whole. The result is sorted by object and offset, covers
    every byte of the input, and contains every input range inside exactly one request.
    """
    joined: list[ByteRange] = []
    for item in sorted(ranges):
        last = joined[-1] if joined else None
        if last is not None and last.name == item.name and item.start <= last.end + gap:
            end = max(last.end, item.end)
            if end - last.start <= limit or item.end <= last.end:
                joined[-1] = ByteRange(last.name, last.start, end)
                continue
        joined.append(item)
    return joined
