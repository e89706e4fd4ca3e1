"""What is packed comes out again as it went in, small."""

import base64
import json
import zlib

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.boxes import Box
from dcp.columns import BoxColumns, RecordColumns
from dcp.index import Chunk, Chunks, TensorEntry
from dcp.record import Record
from flows.report.chunking import Patterns, Tilings, columns_of
from flows.report.packing import EXACT, Packed, pack_columns, pack_json

_FILES = {"__0_0.distcp": 0, "__1_0.distcp": 1}


def unpacked(packed: Packed) -> npt.NDArray[np.int64]:
    """The columns as the page's script gets them."""
    data = zlib.decompress(base64.b64decode(packed.data))
    steps = np.frombuffer(data, "<f8" if packed.wide else "<i4").reshape(packed.columns, packed.rows)
    return steps.cumsum(axis=1).astype(np.int64)


@given(
    st.integers(0, 4).flatmap(
        lambda rows: st.lists(
            st.lists(st.integers(-EXACT // 2, EXACT // 2), min_size=rows, max_size=rows),
            min_size=1,
            max_size=3,
        )
    )
)
def test_columns_come_out_as_they_went_in(columns: list[list[int]]) -> None:
    packed = pack_columns([np.array(column, np.int64) for column in columns])
    assert unpacked(packed).tolist() == columns


def test_json_comes_out_as_it_went_in() -> None:
    value = {"names": ["ä", "</script>"], "n": [1, None, 2.5]}
    assert json.loads(zlib.decompress(base64.b64decode(pack_json(value)))) == value


def _entry(key: str, rows: int, *, as_columns: bool = False) -> TensorEntry:
    boxes = [Box((8 * i, 0), (8, 4)) for i in range(rows)]
    records = [Record(f"__{i % 2}_0.distcp", 100 * i, 100) for i in range(rows)]
    if not as_columns:
        return TensorEntry(key, "float32", (8 * rows, 4), Chunks.of(map(Chunk, boxes, records)))
    places = [(name, ()) for name in _FILES]
    columns = RecordColumns(
        places,
        np.array([i % 2 for i in range(rows)], np.int32),
        np.array([r.offset for r in records], np.int64),
        np.array([r.length for r in records], np.int64),
    )
    many = BoxColumns(
        np.array([box.offsets for box in boxes], np.int64), np.array([box.sizes for box in boxes], np.int64)
    )
    return TensorEntry(key, "float32", (8 * rows, 4), Chunks(many, columns))


def _rows(tilings: Tilings, number: int) -> list[list[int]]:
    pattern = tilings.patterns[number]
    columns = unpacked(tilings.pools[pattern.pool])
    rows: list[list[int]] = columns[:, pattern.start : pattern.start + pattern.rows].T.tolist()
    return rows


@pytest.mark.parametrize("as_columns", [False, True])
def test_layers_that_are_cut_alike_are_packed_once(as_columns: bool) -> None:
    patterns = Patterns()
    same = [patterns.number(columns_of(_entry(key, 6, as_columns=as_columns), _FILES)) for key in "abc"]
    other = patterns.number(columns_of(_entry("d", 4), _FILES))
    tilings = patterns.packed()
    assert len(set(same)) == 1
    assert other not in same
    assert len(tilings.patterns) == 2
    assert _rows(tilings, same[0]) == [[8 * i, 0, 8, 4, i % 2] for i in range(6)]
    assert _rows(tilings, other) == [[8 * i, 0, 8, 4, i % 2] for i in range(4)]


def test_columns_and_tuples_are_the_same_pattern() -> None:
    patterns = Patterns()
    numbers = {patterns.number(columns_of(_entry("a", 6, as_columns=each), _FILES)) for each in (True, False)}
    assert len(numbers) == 1


def test_what_does_not_fit_is_counted_in_cells_and_no_chunk_is_lost() -> None:
    patterns = Patterns()
    random = np.random.default_rng(0)
    rows = 20_000
    offsets = np.sort(random.choice(1 << 30, rows, replace=False)).astype(np.int64)
    sizes = np.append(np.diff(offsets), (1 << 30) - offsets[-1])
    entry = TensorEntry(
        "a",
        "int8",
        (1 << 30,),
        Chunks(
            BoxColumns(offsets[:, None], sizes[:, None]),
            RecordColumns([("__0_0.distcp", ())], np.zeros(rows, np.int32), offsets, sizes),
        ),
    )
    number = patterns.number(columns_of(entry, _FILES))
    tilings = patterns.packed(budget=1000)
    assert tilings.patterns[number].coarse
    assert sum(len(pool.data) for pool in tilings.pools) < 2000
    cells = _rows(tilings, number)
    assert sum(count for *_, count in cells) == rows
    assert {file for *_, file, _ in cells} == {0}


def test_more_room_gives_finer_cells_to_go_into() -> None:
    def cells(budget: int) -> int:
        patterns = Patterns()
        rows = 60_000
        steps = np.random.default_rng(0).integers(1, 1 << 20, rows)
        offsets = np.cumsum(steps) - steps
        entry = TensorEntry(
            "a",
            "int8",
            (int(steps.sum()),),
            Chunks(
                BoxColumns(offsets[:, None], steps[:, None]),
                RecordColumns([("__0_0.distcp", ())], np.zeros(rows, np.int32), offsets, steps),
            ),
        )
        number = patterns.number(columns_of(entry, _FILES))
        pattern = patterns.packed(budget).patterns[number]
        assert pattern.coarse
        return pattern.rows

    found = [cells(budget) for budget in (0, 1_000, 4_000)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (48, 1024)


def test_extents_beyond_a_browsers_numbers_are_not_drawn() -> None:
    huge = TensorEntry("a", "int8", (1 << 60,), Chunks.of([Chunk(Box((0,), (1 << 60,)), None)]))
    assert Patterns().number(columns_of(huge, {})) == -1


def test_chunks_of_another_rank_than_the_tensor_are_left_out() -> None:
    chunks = Chunks.of([Chunk(Box((0,), (4,)), None), Chunk(Box((0, 0), (4, 4)), None)])
    columns = columns_of(TensorEntry("a", "int8", (4, 4), chunks), {})
    assert columns.offsets.tolist() == [[0, 0]]
    assert columns.file.tolist() == [-1]
