"""What an index claims is worth work only if a file could hold it."""

import pytest

from dcp.boxes import Box
from dcp.checks.sound import is_sound
from dcp.index import Chunk, Chunks, ObjectEntry, TensorEntry
from dcp.record import Record


@pytest.mark.parametrize(
    ("chunk", "record", "sound"),
    [
        (Box((0,), (1000,)), Record("f", 0, 5000), True),
        (Box((0,), (1000,)), Record("f", 0, 400), False),
        (Box((0,), (1000,)), Record("f", 0, 400, ("stream.zstd/1",)), True),
        (Box((1,), (1000,)), Record("f", 0, 5000), False),
        (Box((0, 0), (1000, 1)), Record("f", 0, 5000), False),
        (Box((0,), (1000,)), None, False),
        (Box((0,), (1000,)), Record("f", 0, 1 << 200), False),
    ],
)
def test_what_is_sound(chunk: Box, record: Record | None, sound: bool) -> None:
    assert is_sound(TensorEntry("w", "float32", (1000,), Chunks.of([Chunk(chunk, record)]))) == sound


@pytest.mark.parametrize(
    ("record", "sound"),
    [
        (Record("f", 0, 9), True),
        (Record("f", 0, 1 << 200), False),
        (Record("f", -1 << 70, 9), False),
        (None, True),
    ],
)
def test_what_is_a_sound_object(record: Record | None, sound: bool) -> None:
    assert is_sound(ObjectEntry("o", record)) == sound


@pytest.mark.parametrize("shape", [(1 << 62, 1 << 62), (1 << 70, 0)])
def test_shapes_beyond_all_numbers_are_not_sound(shape: tuple[int, ...]) -> None:
    chunk = Chunk(Box((0, 0), shape), Record("f", 0, 4000))
    assert not is_sound(TensorEntry("w", "float32", shape, Chunks.of([chunk])))
