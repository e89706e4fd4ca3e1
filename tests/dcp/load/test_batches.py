"""Batches hold everything once, within the memory budget."""

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from dcp.boxes import Box, check_tiling
from dcp.dtypes import ITEMSIZE
from dcp.index import CheckpointIndex, Chunk, Chunks, Entry, ObjectEntry, TensorEntry
from dcp.layout import Layout, shard
from dcp.load.batches import BAND, BATCH, batches, bytes_of, cut, slices
from dcp.load.regions import moved
from dcp.record import Record

LAYOUTS = [Layout(fsdp=3), Layout(fsdp=2, tp=4)]
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


def tensor(
    key: str, shape: tuple[int, ...], ranks: int = 1, file: str = "f", at: int = 0, dtype: str = "float32"
) -> TensorEntry:
    """A tensor in ``ranks`` row shards, each in a record of its own."""
    chunks = []
    for rank in range(ranks if shape else 1):
        offset, size = shard(shape[0], ranks, rank) if shape else (0, 0)
        box = Box((offset, *(0,) * (len(shape) - 1)), (size, *shape[1:])) if shape else Box((), ())
        nbytes = box.volume * ITEMSIZE[dtype]
        chunks.append(Chunk(box, Record(file, at, nbytes + 1000)))
        at += nbytes + 1000
    return TensorEntry(key, dtype, shape, Chunks.of(chunks))


@st.composite
def indices(draw: st.DrawFn) -> CheckpointIndex:
    entries: dict[str, Entry] = {}
    at = 0
    for number in range(draw(st.integers(0, 6))):
        key = f"k{number}"
        if draw(st.booleans()):
            entries[key] = ObjectEntry(key, Record("f", at, 700))
            at += 700
        else:
            entries[key] = tensor(key, draw(SHAPES), draw(st.integers(1, 3)), at=at)
            at += 10_000
    return CheckpointIndex(entries, {key: (key, 1) for key in entries})


@given(indices(), st.integers(64, 5000))
def test_batches_need_every_byte_once_within_the_budget(index: CheckpointIndex, budget: int) -> None:
    cuts = cut(index, LAYOUTS, budget)
    found = list(batches(index, cuts, budget))
    assert [each.entry.key for batch in found for each in batch.objects] == [e.key for e in index.objects]
    regions: dict[tuple[str, int], list[Box]] = {}
    for batch in found:
        for band in batch.bands:
            for each in band.needs:
                box = each.need.span.box
                assert each.region == moved(box, each.need.chunk.box.offsets)
                assert each.need.cost == box.volume * 4
                regions.setdefault((band.entry.key, each.chunk), []).append(box)
        items = len(batch.bands) + len(batch.objects)
        assert items == 1 or sum(need.cost for need in batch.needs) <= budget // 8
    for entry in index.tensors:
        for number, chunk in enumerate(entry.chunks):
            assert check_tiling(chunk.box.sizes, regions.pop((entry.key, number), [])).ok
    assert not regions


@given(SHAPES, st.integers(64, 5000))
def test_all_ranks_hold_a_band_in_an_eighth_of_the_budget(shape: tuple[int, ...], budget: int) -> None:
    index = CheckpointIndex({"w": tensor("w", shape)}, None)
    for band in cut(index, LAYOUTS, budget)["w"].boxes:
        for layout in LAYOUTS:
            copies = sum(box.volume for box in layout.boxes(shape)) / prod(shape)
            assert band.volume == 1 or band.volume * 4 * copies <= budget / 8


@given(indices(), st.integers(1, 20))
def test_slices_divide_the_keys(index: CheckpointIndex, most: int) -> None:
    parts = list(slices(index, most))
    keys = [key for part in parts for key in part.entries]
    assert sorted(keys) == sorted(index.entries)
    assert sum(map(bytes_of, parts)) == bytes_of(index)
    for part in parts:
        assert part.paths == {key: (key, 1) for key in part.entries}
        pieces = sum(len(e.chunks) for e in part.tensors) + len(part.objects)
        assert len(part.entries) == 1 or pieces <= most


def test_slices_follow_the_files_and_count_bands() -> None:
    entries = [
        tensor("b", (4,), file="2"),
        tensor("c", (3, BAND // 4), file="1"),
        tensor("a", (4,), file="0"),
    ]
    index = CheckpointIndex({entry.key: entry for entry in entries}, None)
    assert [list(part.entries) for part in slices(index, 10)] == [["a", "c", "b"]]
    assert [list(part.entries) for part in slices(index, 5)] == [["a", "c"], ["b"]]
    assert [list(part.entries) for part in slices(index, 4)] == [["a"], ["c"], ["b"]]
    # Whatever is larger than a slice stands alone, and no slice is empty or counts what stood before.
    assert [list(part.entries) for part in slices(index, 1)] == [["a"], ["c"], ["b"]]
    alone = CheckpointIndex({"c": index.entries["c"]}, None)
    assert [list(part.entries) for part in slices(alone, 1)] == [["c"]]
    same = [tensor(name, (4,), at=at * 10_000) for at, name in enumerate("abcdef")]
    even = CheckpointIndex({entry.key: entry for entry in same}, None)
    assert [list(part.entries) for part in slices(even, 2)] == [["a", "b"], ["c", "d"], ["e", "f"]]


def test_a_large_budget_makes_neither_large_bands_nor_large_batches() -> None:
    index = CheckpointIndex(
        {f"w{number}": tensor(f"w{number}", (40, BAND // 16)) for number in range(3)}, None
    )
    cuts = cut(index, [Layout(fsdp=1)], 1 << 40)
    assert {box.volume * 4 for box in cuts["w0"].boxes} == {BAND}
    costs = [[band.cost for band in batch.bands] for batch in batches(index, cuts, 1 << 40)]
    assert costs == [[BAND] * (BATCH // BAND)] * 7 + [[BAND] * 2]
