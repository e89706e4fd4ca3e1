"""Layouts are parsed as documented and shard exactly as DTensor does."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.boxes import Box, check_tiling
from dcp.errors import UsageError
from dcp.layout import MAX_RANKS, Layout

SHAPES = st.lists(st.integers(0, 17), max_size=4).map(tuple)
LAYOUTS = st.one_of(
    st.builds(Layout, fsdp=st.integers(1, 9)),
    st.builds(Layout, tp=st.integers(1, 9)),
    st.builds(Layout, fsdp=st.integers(1, 5), tp=st.integers(1, 5)),
)


@pytest.mark.parametrize(
    ("text", "layout", "ranks"),
    [
        ("fsdp=2", Layout(fsdp=2), 2),
        ("tp=4", Layout(tp=4), 4),
        ("fsdp=2,tp=3", Layout(fsdp=2, tp=3), 6),
        (" tp = 3 , fsdp = 2 ", Layout(fsdp=2, tp=3), 6),
        ("fsdp=1", Layout(fsdp=1), 1),
        (f"fsdp={MAX_RANKS}", Layout(fsdp=MAX_RANKS), MAX_RANKS),
    ],
)
def test_text_is_parsed(text: str, layout: Layout, ranks: int) -> None:
    assert Layout.parse(text) == layout
    assert layout.ranks == ranks


@pytest.mark.parametrize(
    "text",
    ["", "fsdp", "fsdp=", "fsdp=two", "fsdp=-1", "pp=2", "fsdp=2;tp=2", "fsdp=2,,tp=2", "fsdp=2,",
     "fsdp=" + "9" * 5000, "fsdp=\N{ARABIC-INDIC DIGIT TWO}", "FSDP=2", "fsdp=2.0"],
)  # fmt: skip
def test_other_text_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(UsageError, match="fsdp=N, tp=N or fsdp=N,tp=M") as caught:
        Layout.parse(text)
    assert repr(text) in str(caught.value)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="twice"):
        Layout.parse("fsdp=2,fsdp=3")
    for text in ("fsdp=0", "fsdp=2,tp=0", f"fsdp={MAX_RANKS + 1}", f"fsdp={MAX_RANKS},tp=2"):
        with pytest.raises(UsageError, match=f"1 to {MAX_RANKS}"):
            Layout.parse(text)
    with pytest.raises(UsageError, match="at least one"):
        Layout()


@given(LAYOUTS)
def test_text_of_a_layout_parses_back(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


def test_two_axes_number_ranks_row_by_row() -> None:
    boxes = Layout(fsdp=2, tp=2).boxes((8, 8))
    assert [box.offsets for box in boxes] == [(0, 0), (0, 4), (4, 0), (4, 4)]


def test_uneven_and_empty_shards() -> None:
    assert [(box.offsets[0], box.sizes[0]) for box in Layout(fsdp=4).boxes((5,))] == [
        (0, 2),
        (2, 2),
        (4, 1),
        (5, 0),
    ]
    assert Layout(fsdp=3, tp=2).boxes(()) == (Box((), ()),) * 6


@settings(deadline=None)  # the first call imports torch
@given(LAYOUTS, SHAPES)
def test_boxes_are_those_of_dtensor(layout: Layout, shape: tuple[int, ...]) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    mesh = tuple(size for _, size in layout.axes)
    placements = [Replicate() if dim is None else Shard(dim) for dim in layout.shard_dims(shape)]
    expected = [
        _compute_local_shape_and_global_offset(shape, mesh, list(place), placements)
        for place in product(*map(range, mesh))
    ]
    assert [(box.sizes, box.offsets) for box in layout.boxes(shape)] == expected


@given(LAYOUTS, SHAPES)
def test_distinct_boxes_tile_the_tensor(layout: Layout, shape: tuple[int, ...]) -> None:
    assert check_tiling(shape, sorted(set(layout.boxes(shape)), key=lambda box: box.offsets)).ok
