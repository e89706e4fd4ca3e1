"""What is said of a tensor's chunks and records is the same in columns and in plain objects, to the byte."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dcp.boxes import Box
from dcp.checks.tiling import check_tensor, short_records
from dcp.columns import BoxColumns, RecordColumns
from dcp.index import Chunk, Chunks, TensorEntry
from dcp.record import Record

ROWS = 1000


def entry(length: int, dtype: str, *, columns: bool, transforms: tuple[str, ...] = ()) -> TensorEntry:
    """Two chunks of 1000 elements; the second one's record has ``length`` bytes."""
    chunks: Any
    if columns:
        boxes = BoxColumns(np.array([[0], [ROWS]]), np.array([[ROWS], [ROWS]]))
        lengths = np.array([1 << 20, length])
        chunks = Chunks(
            boxes, RecordColumns((("f", transforms),), np.array([0, 0]), np.array([0, 1 << 20]), lengths)
        )
    else:
        records = (Record("f", 0, 1 << 20, transforms), Record("f", 1 << 20, length, transforms))
        chunks = Chunks((Box((0,), (ROWS,)), Box((ROWS,), (ROWS,))), records)
    return TensorEntry("w", dtype, (2 * ROWS,), chunks)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2), ("int8", 1)])
def test_a_record_is_too_short_by_one_byte_and_not_by_none(columns: bool, dtype: str, item: int) -> None:
    assert not list(check_tensor(entry(ROWS * item, dtype, columns=columns)))
    [found] = check_tensor(entry(ROWS * item - 1, dtype, columns=columns))
    assert (found.code, found.key, found.file) == ("records.mismatch", "w", "f")
    assert found.detail == {
        "offset": 1 << 20,
        "length": ROWS * item - 1,
        "expected": ROWS * item,
        "actual": ROWS * item - 1,
    }
    assert f"needs {ROWS * item} bytes, its record in f has {ROWS * item - 1}" in found.message


@pytest.mark.parametrize("columns", [False, True])
def test_a_compressed_record_may_be_short(columns: bool) -> None:
    assert not list(short_records(entry(9, "float32", columns=columns, transforms=("stream.zstd/1",))))


def test_a_chunk_without_a_record_is_not_called_short() -> None:
    whole = entry(ROWS, "int8", columns=True)
    columns = whole.chunks.records
    assert isinstance(columns, RecordColumns)
    absent = RecordColumns(columns.places, np.array([0, -1]), columns.offset, np.array([1 << 20, 0]))
    for records in (absent, tuple(absent)):
        assert not list(short_records(replace(whole, chunks=Chunks(tuple(whole.chunks.boxes), records))))
        assert not list(short_records(replace(whole, chunks=Chunks(whole.chunks.boxes, records))))


@pytest.mark.parametrize("side", [1 << 31, 1 << 40])
def test_products_beyond_64_bits_are_compared_all_the_same(side: int) -> None:
    boxes = BoxColumns(np.array([[0, 0]]), np.array([[side, side]]))
    records = RecordColumns((("f", ()),), np.array([0]), np.array([0]), np.array([100]))
    [found] = short_records(TensorEntry("w", "float64", (side, side), Chunks(boxes, records)))
    assert found.detail["expected"] == side * side * 8


@pytest.mark.parametrize(
    ("sizes", "reach"),
    [([(3, 0)], (3, 0)), ([(2, 0), (5, 0)], None), ([(5, 0)], None), ([], None), ([(5,)], None)],
)
def test_chunks_of_an_empty_tensor_reach_its_shape(
    sizes: list[tuple[int, ...]], reach: tuple[int, ...] | None
) -> None:
    chunks = Chunks.of(Chunk(Box((0,) * len(size), size), Record("f", 0, 400)) for size in sizes)
    found = [f for f in check_tensor(TensorEntry("w", "float32", (5, 0), chunks)) if f.code == "tiling.gap"]
    assert [f.detail["actual"] for f in found] == ([] if reach is None else [list(reach)])
