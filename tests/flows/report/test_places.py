"""Where chunks stand: what is packed comes out again, small, and the page shows it."""

import re
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import expect

from dcp.checkpoint import read_index
from dcp.index import TensorEntry
from dcp.inspection import inspect
from flows.report.checkpoint import gather_checkpoint
from flows.report.packing import EXACT
from flows.report.places import Places, Ranges, pack_places
from tests.flows.report.conftest import Open, page_of
from tests.flows.report.test_packing import unpacked
from tests.support.indices import rows, write_index


def _ranges(chunks: list[tuple[int, int, int]]) -> Ranges:
    file, begin, length = (
        (np.array(column, np.int64) for column in zip(*chunks, strict=True))
        if chunks
        else (np.zeros(0, np.int64),) * 3
    )
    return Ranges(file, begin, length)


def _out(places: Places, key: int, files: list[int]) -> list[tuple[int, int]] | None:
    """What the page's script makes of it: (begin, end) of each chunk."""
    start = places.starts[key]
    if start < 0:
        return None
    columns = np.concatenate([unpacked(pool) for pool in places.pools], axis=1)
    ends: dict[int, int] = {}
    found = []
    for row, file in enumerate(files):
        behind, length = columns[:, start + row].tolist()
        begin = ends.get(file, 0) + behind
        ends[file] = begin + length
        found.append((begin, begin + length))
    return found


_CHUNKS = st.lists(
    st.tuples(st.integers(-1, 3), st.integers(0, EXACT // 4 - 1), st.integers(0, EXACT // 4 - 1)), max_size=6
)


@given(st.lists(_CHUNKS, max_size=5))
def test_ranges_come_out_as_they_went_in(keys: list[list[tuple[int, int, int]]]) -> None:
    places = pack_places([_ranges(chunks) for chunks in keys], budget=1 << 30)
    for key, chunks in enumerate(keys):
        expected = [(begin, begin + length) for _, begin, length in chunks] or None
        assert _out(places, key, [file for file, _, _ in chunks]) == expected


def test_what_a_browser_cannot_count_to_is_left_out_alone() -> None:
    keys = [[(0, EXACT, 1)], [(0, -1, 5)], [(0, 7, 5)]]
    places = pack_places([*map(_ranges, keys), None])
    assert places.starts == (-1, -1, 0, -1)


def test_files_that_are_written_alike_cost_next_to_nothing() -> None:
    keys = [[(rank, 1000 * key, 900) for rank in range(64)] for key in range(500)]
    places = pack_places([_ranges(chunks) for chunks in keys])
    assert min(places.starts) == 0
    assert sum(len(pool.data) for pool in places.pools) < 6_000


def test_the_budget_goes_to_the_keys_with_the_fewest_chunks() -> None:
    random = np.random.default_rng(0)
    keys = [[(0, int(at), 9) for at in random.integers(0, 1 << 40, count)] for count in (90_000, 3, 80_000)]
    places = pack_places([_ranges(chunks) for chunks in keys], budget=100_000)
    assert places.starts == (-1, 0, -1)
    assert sum(len(pool.data) for pool in places.pools) <= 100_000


def test_the_map_shows_the_bytes_that_the_index_names(opened: Open, tmp_path: Path) -> None:
    tensors = {f"layer.{i}": rows(6, 8, 4, ranks=3) for i in range(4)} | {"big": rows(40, 8, 4, ranks=4)}
    directory = write_index(tmp_path / "step_1", tensors)
    entry = read_index(str(directory)).entries["layer.2"]
    assert isinstance(entry, TensorEntry)
    with opened(page_of(directory, tmp_path / "page.html")) as it:
        page = it.page
        page.fill("#search", "layer.2")
        expect(page.locator("#matches")).to_have_text("1 key found")
        page.locator("#tree .key").first.click()
        expect(page.locator("#map h3")).to_have_text("layer.2")
        page.click("#map summary")
        page.wait_for_selector("#map tbody tr")
        shown = [row.split("\t")[2:] for row in page.inner_text("#map tbody").splitlines()]
        records = [chunk.record for chunk in entry.chunks]
        assert shown == [[r.path, f"{r.offset}:{r.end}"] for r in records if r]
        page.focus(".canvas")
        page.keyboard.press("Home")
        first = records[0]
        assert first is not None
        said = re.sub("[\u2068\u2069]", "", page.inner_text("#map-said"))
        assert said.endswith(f"written by rank 0, in bytes {first.offset}:{first.end} of {first.path}")


def test_what_stood_in_a_file_that_is_gone_or_cut_off_is_marked_and_hatched(
    opened: Open, tmp_path: Path
) -> None:
    tensors = {"layer.0": rows(4, 8, 4, ranks=4), "layer.1": rows(3, 8, 4, ranks=3)}
    directory = write_index(tmp_path / "step_1", tensors)
    (directory / "__3_0.distcp").unlink()
    cut = directory / "__2_0.distcp"
    with cut.open("r+b") as file:
        file.truncate(cut.stat().st_size - 1)
    facts = gather_checkpoint(str(directory), copied=True)
    assert [(share.rank, share.records) for share in facts.shares.ranks] == [(0, 2), (1, 2), (2, 2), (3, 1)]
    assert inspect(directory).totals.ranks == 4
    page_of(directory, tmp_path / "page.html", copied=True)
    with opened(tmp_path / "page.html") as it:
        page = it.page
        assert page.inner_text("#map h3") == "layer.0", "it begins with what is damaged"
        assert page.inner_text("#map-said").endswith(
            "No gap, no overlap. The bytes of 1 chunk are not there."
        )
        assert page.locator(".canvas .lost").count() == 1
        assert "bytes not there" in page.inner_text("#map .legend")
        page.focus(".canvas")
        page.keyboard.press("End")
        said = re.sub("[\u2068\u2069]", "", page.inner_text("#map-said"))
        assert said.endswith("written by rank 3, in bytes 0:864 of __3_0.distcp, which does not exist")
        page.check("#marked")
        expect(page.locator("#matches")).to_have_text("2 keys found")
        page.locator("#tree .key").last.click()
        expect(page.locator("#map h3")).to_have_text("layer.1")
        page.focus(".canvas")
        page.keyboard.press("End")
        assert "__2_0.distcp" in page.inner_text("#map-said")
        assert page.inner_text("#map-said").endswith("which ends at byte 1727")
