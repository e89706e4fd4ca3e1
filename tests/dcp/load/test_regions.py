from itertools import pairwise, product
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from dcp.boxes import Box, check_tiling, intersect, whole
from dcp.load.regions import Cuts, bands, span_of, spans, strides

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)
LIMITS = st.integers(1, 200)
ITEMSIZES = st.sampled_from([1, 2, 8])


@st.composite
def regions(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    """A shape and a region inside it."""
    shape = draw(SHAPES)
    offsets = tuple(draw(st.integers(0, n)) for n in shape)
    sizes = tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True))
    return shape, Box(offsets, sizes)


def bytes_of(box: Box, shape: tuple[int, ...], itemsize: int) -> set[int]:
    """Positions of the first byte of every element of ``box`` in a C-ordered array of ``shape``."""
    indices = product(*(range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True)))
    return {
        sum(i * step for i, step in zip(index, strides(shape), strict=True)) * itemsize for index in indices
    }


@given(SHAPES, ITEMSIZES, LIMITS)
def test_bands_tile_in_order_and_keep_the_limit(shape: tuple[int, ...], itemsize: int, limit: int) -> None:
    cuts = list(bands(shape, itemsize, limit))
    assert check_tiling(shape, cuts).ok
    assert all(cut.volume == 1 or cut.volume * itemsize <= limit for cut in cuts)
    position = 0
    for cut in cuts:
        held = sorted(bytes_of(cut, shape, itemsize))
        assert held == list(range(position, position + cut.volume * itemsize, itemsize))
        position += cut.volume * itemsize
    assert position == prod(shape) * itemsize


def test_bands_are_not_smaller_than_they_must_be() -> None:
    assert list(bands((10, 4), 4, 64)) == [Box((0, 0), (4, 4)), Box((4, 0), (4, 4)), Box((8, 0), (2, 4))]
    assert list(bands((2, 6), 4, 12)) == [Box((r, c), (1, 3)) for r in (0, 1) for c in (0, 3)]
    assert list(bands((), 8, 1)) == [Box((), ())]
    assert list(bands((3, 0), 8, 100)) == []


@given(regions(), LIMITS)
def test_overlapping_finds_every_band_a_box_meets(case: tuple[tuple[int, ...], Box], limit: int) -> None:
    shape, box = case
    cuts = Cuts.of(shape, 1, limit)
    every = [(number, intersect(cut, box)) for number, cut in enumerate(cuts.boxes)] if box.volume else []
    assert list(cuts.overlapping(box)) == [(n, common) for n, common in every if common is not None]


@given(regions(), ITEMSIZES)
def test_a_contiguous_region_is_one_span(case: tuple[tuple[int, ...], Box], itemsize: int) -> None:
    shape, box = case
    held = bytes_of(box, shape, itemsize)
    if held and max(held) - min(held) == (len(held) - 1) * itemsize:
        span = span_of(box, shape, itemsize)
        assert (span.box, span.start, span.end) == (box, min(held), max(held) + itemsize)


@given(regions(), ITEMSIZES, st.integers(0, 60), LIMITS)
def test_spans_hold_the_region_once_and_no_wider_gap(
    case: tuple[tuple[int, ...], Box], itemsize: int, gap: int, limit: int
) -> None:
    shape, region = case
    found = list(spans(region, shape, itemsize, gap=gap, limit=limit))
    local = [span.box.shifted(region.offsets) for span in found]
    assert check_tiling(region.sizes, local).ok
    for span in found:
        held = sorted(bytes_of(span.box, shape, itemsize))
        assert (held[0], held[-1] + itemsize) == (span.start, span.end)
        assert all(b - a - itemsize <= gap for a, b in pairwise(held))
        assert span.box.volume == 1 or span.end - span.start <= limit
    assert [span.start for span in found] == sorted(span.start for span in found)


def test_spans_of_rows_and_of_columns() -> None:
    rows = list(spans(Box((2, 0), (3, 4)), (6, 4), 4, gap=0, limit=1000))
    assert [(s.start, s.end) for s in rows] == [(32, 80)]
    columns = Box((0, 1), (3, 2))
    apart = list(spans(columns, (3, 4), 4, gap=7, limit=1000))
    assert [(s.start, s.end) for s in apart] == [(4, 12), (20, 28), (36, 44)]
    joined = list(spans(columns, (3, 4), 4, gap=8, limit=1000))
    assert [(s.start, s.end) for s in joined] == [(4, 44)]
    assert [s.box for s in spans(whole((4, 4)), (4, 4), 4, gap=0, limit=40)] == [
        Box((0, 0), (2, 4)),
        Box((2, 0), (2, 4)),
    ]
