"""Bands: they give a tensor's bytes in order, whatever the chunks and however small the budget."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.boxes import Box
from dcp.exporting.bands import MOST_PIECES, bands, with_few_pieces
from dcp.index import Chunk, Chunks, TensorEntry
from tests.dcp.test_boxes import tilings


@settings(max_examples=300)
@given(tilings(), st.integers(1, 200), st.sampled_from(["uint8", "int32"]))
def test_bands_give_the_bytes_in_order(
    tiling: tuple[tuple[int, ...], list[Box]], budget: int, dtype: str
) -> None:
    shape, boxes = tiling
    entry = TensorEntry("t", dtype, shape, Chunks.of(Chunk(box, None) for box in boxes))
    whole = np.arange(prod(shape), dtype=dtype).reshape(shape)

    def bytes_of(box: Box) -> bytes:
        return whole[tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))].tobytes()

    contents = {chunk: bytes_of(chunk.box) for chunk in entry.chunks}
    reached = dict.fromkeys(contents, 0)
    out = b""
    for band in bands(entry, budget):
        assert band.nbytes <= max(budget, whole.itemsize)
        assert band.nbytes == len(bytes_of(band.box)) == sum(piece.nbytes for piece in band.pieces)
        for piece in band.pieces:
            assert contents[piece.chunk][piece.start : piece.end] == bytes_of(piece.box)
            assert piece.start == reached[piece.chunk], "a chunk is read in order and without holes"
            reached[piece.chunk] = piece.end
        if band.straight:
            joined = b"".join(contents[piece.chunk][piece.start : piece.end] for piece in band.pieces)
            assert joined == bytes_of(band.box)
        out += bytes_of(band.box)
    assert out == whole.tobytes()
    assert all(reached[chunk] == len(content) for chunk, content in contents.items())


def test_row_shards_are_straight_and_column_shards_are_not() -> None:
    rows = TensorEntry("t", "uint8", (8, 4), Chunks.of(Chunk(Box((r, 0), (4, 4)), None) for r in (0, 4)))
    assert all(band.straight for band in bands(rows, 12))
    columns = TensorEntry("t", "uint8", (8, 4), Chunks.of(Chunk(Box((0, c), (8, 2)), None) for c in (0, 2)))
    assert not any(band.straight for band in bands(columns, 12))


def test_few_pieces_meet_in_a_band_however_small_chunks_are() -> None:
    rows = 3 * MOST_PIECES
    chunks = Chunks.of(Chunk(Box((row, 0), (1, 2)), None) for row in range(rows))
    entry = TensorEntry("w", "float32", (rows, 2), chunks)
    cut = list(bands(entry, with_few_pieces(entry, 1 << 30)))
    assert [len(band.pieces) for band in cut] == [MOST_PIECES] * 3
    whole = TensorEntry("w", "float32", (rows, 2), Chunks.of([Chunk(Box((0, 0), (rows, 2)), None)]))
    assert with_few_pieces(whole, 1000) == 1000
    assert [b.box for b in bands(entry, 1000)] == [b.box for b in bands(whole, 1000)], "alike are cut alike"
