"""Geometry: intersections, and tilings found whole or faulty, against brute force."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.boxes import Box, Shape, check_tiling, intersect, whole

A, B = Box((0, 0), (6, 4)), Box((6, 0), (6, 4))


@pytest.mark.parametrize(
    ("chunk", "request_", "expected"),
    [
        (A, Box((0, 0), (4, 4)), ((0, 0), (0, 0), (4, 4))),
        (A, Box((4, 0), (4, 4)), ((4, 0), (0, 0), (2, 4))),
        (B, Box((4, 0), (4, 4)), ((0, 0), (2, 0), (2, 4))),
        (B, Box((8, 0), (4, 4)), ((2, 0), (0, 0), (4, 4))),
        (A, Box((8, 0), (4, 4)), None),
        (B, Box((0, 0), (4, 4)), None),
    ],
)
def test_two_rank_save_read_by_three(chunk: Box, request_: Box, expected: tuple[Shape, ...] | None) -> None:
    common = intersect(chunk, request_)
    if expected is None:
        assert common is None
    else:
        assert common is not None
        found = common.shifted(chunk.offsets).offsets, common.shifted(request_.offsets).offsets, common.sizes
        assert found == expected


def test_blocks_read_as_column_strips() -> None:
    blocks = [Box(offsets, (4, 4)) for offsets in ((0, 0), (0, 4), (4, 0), (4, 4))]
    strips = [Box((0, 2 * rank), (8, 2)) for rank in range(4)]
    reads = [[c for b in blocks if (c := intersect(b, s)) is not None] for s in strips]
    assert [[c.sizes for c in found] for found in reads] == [[(4, 2), (4, 2)]] * 4


def elements(box: Box) -> set[Shape]:
    return set(itertools.product(*(range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))))


shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def split(draw: st.DrawFn, region: Box, depth: int) -> list[Box]:
    """A random tiling of a region by straight cuts."""
    dims = [d for d, s in enumerate(region.sizes) if s > 1]
    if not dims or depth == 0 or not draw(st.booleans()):
        return [region]
    dim = draw(st.sampled_from(dims))
    cut = draw(st.integers(1, region.sizes[dim] - 1))
    low, high = list(region.sizes), list(region.sizes)
    low[dim], high[dim] = cut, region.sizes[dim] - cut
    offsets = list(region.offsets)
    offsets[dim] += cut
    return draw(split(Box(region.offsets, tuple(low)), depth - 1)) + draw(
        split(Box(tuple(offsets), tuple(high)), depth - 1)
    )


@st.composite
def tilings(draw: st.DrawFn) -> tuple[Shape, list[Box]]:
    shape = draw(shapes)
    boxes = draw(split(whole(shape), 5))
    if shape and draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        offsets = tuple(n if d == dim else 0 for d, n in enumerate(shape))
        boxes.append(Box(offsets, tuple(0 if d == dim else n for d, n in enumerate(shape))))
    return shape, draw(st.permutations(boxes))


@given(tilings())
def test_tilings_are_accepted(tiling: tuple[Shape, list[Box]]) -> None:
    shape, boxes = tiling
    assert check_tiling(shape, boxes).ok


@given(tilings(), st.data())
def test_any_single_fault_is_found(tiling: tuple[Shape, list[Box]], data: st.DataObject) -> None:
    shape, boxes = tiling
    solid = [i for i, box in enumerate(boxes) if box.volume]
    if not solid:
        return
    chosen = data.draw(st.sampled_from(solid))
    box = boxes[chosen]
    fault = data.draw(
        st.sampled_from(["remove", "double", "move", "grow", "shrink"] if shape else ["remove", "double"])
    )
    dim = data.draw(st.integers(0, len(shape) - 1)) if shape else 0
    step = data.draw(st.sampled_from([-1, 1]))
    if fault == "remove":
        changed = boxes[:chosen] + boxes[chosen + 1 :]
        assert [c for c in map(elements, check_tiling(shape, changed).gaps) if c]
        assert set().union(*map(elements, check_tiling(shape, changed).gaps)) == elements(box)
        return
    if fault == "double":
        result = check_tiling(shape, [*boxes, box])
        assert any(set(pair) == {chosen, len(boxes)} for *pair, _ in result.overlaps)
        return
    offsets, sizes = list(box.offsets), list(box.sizes)
    if fault == "move":
        offsets[dim] += step
    elif fault == "grow":
        sizes[dim] += 1
    else:
        sizes[dim] -= 1
    moved = Box(tuple(offsets), tuple(sizes))
    result = check_tiling(shape, [*boxes[:chosen], moved, *boxes[chosen + 1 :]])
    assert not result.ok
    if fault == "shrink":
        assert set().union(*map(elements, result.gaps)) == elements(box) - elements(moved)


@settings(max_examples=300)
@given(st.data())
def test_arbitrary_boxes_agree_with_counting(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), max_size=3).map(tuple))
    boxes = [
        Box(
            tuple(data.draw(st.integers(-1, n)) for n in shape),
            tuple(data.draw(st.integers(0, n + 1)) for n in shape),
        )
        for _ in range(data.draw(st.integers(0, 5)))
    ]
    result = check_tiling(shape, boxes)
    space = elements(whole(shape))
    inside = [i for i, box in enumerate(boxes) if elements(box) <= space and min(box.offsets, default=0) >= 0]
    inside = [
        i
        for i in inside
        if all(o + s <= n for o, s, n in zip(boxes[i].offsets, boxes[i].sizes, shape, strict=True))
    ]
    assert result.out_of_bounds == [i for i in range(len(boxes)) if i not in inside]
    covered = set().union(*(elements(boxes[i]) for i in inside)) if inside else set()
    gaps = [elements(gap) for gap in result.gaps]
    assert set().union(*gaps) == space - covered
    assert sum(map(len, gaps)) == len(space - covered), "gaps must not overlap"
    expected = {
        (i, j) for i, j in itertools.combinations(inside, 2) if elements(boxes[i]) & elements(boxes[j])
    }
    assert {(i, j) for i, j, _ in result.overlaps} == expected
    for i, j, common in result.overlaps:
        assert elements(common) == elements(boxes[i]) & elements(boxes[j])


def test_a_gap_and_an_overlap_of_equal_volume_do_not_cancel() -> None:
    boxes = [Box((0,), (4,)), Box((2,), (4,)), Box((8,), (2,))]
    result = check_tiling((10,), boxes)
    assert [(i, j, str(c)) for i, j, c in result.overlaps] == [(0, 1, "[2:4]")]
    assert [str(gap) for gap in result.gaps] == ["[6:8]"]


def test_pinwheel_is_a_tiling_and_its_hole_is_named() -> None:
    wheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1))]
    assert check_tiling((3, 3), [*wheel, Box((1, 1), (1, 1))]).ok
    assert check_tiling((3, 3), wheel).gaps == [Box((1, 1), (1, 1))]


def test_one_missing_chunk_of_a_grid_is_one_gap() -> None:
    grid = [Box((8 * r, 8 * c), (8, 8)) for r in range(40) for c in range(40)]
    missing = grid.pop(777)
    assert check_tiling((320, 320), grid).gaps == [missing]


def test_scalars_and_empty_tensors() -> None:
    assert check_tiling((), [Box((), ())]).ok
    assert check_tiling((), []).gaps == [Box((), ())]
    assert check_tiling((), [Box((), ())] * 2).overlaps == [(0, 1, Box((), ()))]
    assert check_tiling((0, 3), []).ok
    assert check_tiling((0, 3), [Box((0, 0), (0, 3))] * 2).ok
    assert check_tiling((5,), [Box((0,), (5,)), Box((5,), (0,))]).ok


def test_hostile_numbers_cost_nothing() -> None:
    huge = 10**15
    assert check_tiling((huge, huge), [Box((0, 0), (huge, 1))]).gaps == [Box((0, 1), (huge, huge - 1))]
    result = check_tiling((10,), [Box((0,), (10,))] * 5000, limit=100)
    assert result.truncated
    assert len(result.overlaps) == 100
    assert check_tiling((4,), [Box((0, 0), (4, 4))]).out_of_bounds == [0]


def test_work_grows_in_step_with_chunks() -> None:
    """Counted, not timed: boxes looked at per chunk must not grow with the number of chunks."""

    class Counting(list[Box]):
        reads = 0

        def __getitem__(self, index: int) -> Box:  # type: ignore[override]
            type(self).reads += 1
            return super().__getitem__(index)

    def reads(side: int) -> float:
        Counting.reads = 0
        boxes = Counting(Box((r, c), (1, 1)) for r in range(side) for c in range(side))
        assert check_tiling((side, side), boxes).ok
        return Counting.reads / side**2

    assert reads(64) < 1.5 * reads(16)
