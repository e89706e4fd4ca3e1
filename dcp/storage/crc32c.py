"""CRC-32C, the checksum that Google Cloud Storage keeps of every object: of bytes, and of bytes joined."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from functools import cache

_POLYNOMIAL = 0x82F63B78
_STEP = 1 << 16

_Matrix = tuple[int, ...]
"""A linear map of 32 bits: what it makes of each of them."""


def crc32c(data: bytes | bytearray | memoryview, start: int = 0) -> int:
    """The checksum of ``data`` behind bytes whose checksum is ``start``."""
    import google_crc32c

    view = memoryview(data)
    for at in range(0, len(view), _STEP):
        # Its C function takes bytes only; going in steps keeps the copies small.
        start = google_crc32c.extend(start, bytes(view[at : at + _STEP]))
    return start


def joined(parts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Checksum and length in bytes of parts put one behind another, each given by the same two."""
    total, size = 0, 0
    for crc, length in parts:
        total = _times(_shift(length), total) ^ crc
        size += length
    return total, size


def to_text(crc: int) -> str:
    """As GCS writes it: base64 of four bytes, the highest first."""
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


def from_text(text: str) -> str:
    """8 hexadecimal digits of what GCS writes."""
    return base64.b64decode(text).hex()


def _times(matrix: _Matrix, vector: int) -> int:
    result = 0
    for column in matrix:
        if vector & 1:
            result ^= column
        vector >>= 1
    return result


@cache
def _shift(length: int) -> _Matrix:
    """What ``length`` zero bytes behind it make of a checksum."""
    result: _Matrix = tuple(1 << bit for bit in range(32))
    power = 3  # a byte is eight bits
    while length:
        if length & 1:
            result = tuple(_times(_double(power), column) for column in result)
        power += 1
        length >>= 1
    return result


@cache
def _double(power: int) -> _Matrix:
    """What ``2 ** power`` zero bits make of a checksum."""
    if power == 0:
        return (_POLYNOMIAL, *(1 << bit for bit in range(31)))
    half = _double(power - 1)
    return tuple(_times(half, column) for column in half)
