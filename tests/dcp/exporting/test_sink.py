"""What is told of the bytes that went out is what a second look at them says."""

from __future__ import annotations

import hashlib
import io
import random

import google_crc32c
import pytest

from dcp.errors import StorageError
from dcp.exporting.sink import ChecksumSink, HashingSink

_RANDOM = random.Random(5)
PIECES = [_RANDOM.randbytes(size) for size in (0, 3, 70_000, 1, (1 << 18) + 5, 2_000_000, 17)]


def test_checksums_are_those_of_the_whole() -> None:
    whole = b"".join(PIECES)
    crc32c = f"{google_crc32c.value(whole):08x}"
    plain, hashing = io.BytesIO(), io.BytesIO()
    with ChecksumSink(plain) as sink, HashingSink(hashing) as both:
        for piece in PIECES:
            assert sink.write(memoryview(piece)) == both.write(memoryview(bytearray(piece))) == len(piece)
    assert plain.getvalue() == hashing.getvalue() == whole
    told = sink.written_as("a")
    assert (told.name, told.size, told.crc32c, told.sha256) == ("a", len(whole), crc32c, None)
    assert both.written_as("a").sha256 == both.sha256 == hashlib.sha256(whole).hexdigest()
    assert both.written_as("a").crc32c == crc32c


class _Full:
    def write(self, data: bytes | bytearray | memoryview, /) -> int:
        raise StorageError("the disk is full")


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_what_writing_raises_comes_through(size: int) -> None:
    with pytest.raises(StorageError, match="full"), ChecksumSink(_Full()) as sink:
        sink.write(bytes(size))
    assert sink.size == 0
