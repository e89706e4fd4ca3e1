"""Stand-ins lead torch's own planner to the reads that resharding needs."""

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp.boxes import Box
from dcp.errors import MetadataError
from dcp.index import CheckpointIndex, Chunk, Chunks, TensorEntry
from dcp.layout import Layout
from dcp.load.metadata import torch_metadata
from dcp.load.standin import POISON, Arena, StandIn

Read = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Offsets of the chunk, offsets in the chunk, offsets in the request, lengths."""


def index_of(shape: tuple[int, ...], *chunks: Box, dtype: str = "float32") -> CheckpointIndex:
    entry = TensorEntry("w", dtype, shape, Chunks.of(Chunk(box, None) for box in chunks))
    return CheckpointIndex({"w": entry}, None)


def reads(index: CheckpointIndex, pieces: list[Box]) -> list[Read]:
    """The reads that torch plans for a rank that holds ``pieces`` of the only tensor."""
    [entry] = index.tensors
    planner = DefaultLoadPlanner()
    state = {"w": StandIn(entry.shape, torch.float32, pieces, Arena())}
    planner.set_up_planner(state, torch_metadata(index), is_coordinator=True)
    [plan] = planner.create_global_plan([planner.create_local_plan()])
    return [
        (
            tuple(item.storage_index.offset or ()),
            tuple(item.storage_offsets),
            tuple(item.dest_offsets),
            tuple(item.lengths),
        )
        for item in planner.finish_plan(plan).items
    ]


def test_two_saved_shards_to_three_row_shards() -> None:
    a, b = (0, 0), (6, 0)
    index = index_of((12, 4), Box(a, (6, 4)), Box(b, (6, 4)))
    boxes = Layout(fsdp=3).boxes((12, 4))
    assert [reads(index, [box]) for box in boxes] == [
        [(a, (0, 0), (0, 0), (4, 4))],
        [(a, (4, 0), (0, 0), (2, 4)), (b, (0, 0), (2, 0), (2, 4))],
        [(b, (2, 0), (0, 0), (4, 4))],
    ]


def test_four_saved_blocks_to_four_column_strips() -> None:
    corners = [(0, 0), (0, 4), (4, 0), (4, 4)]
    index = index_of((8, 8), *(Box(corner, (4, 4)) for corner in corners))
    assert [reads(index, [box]) for box in Layout(tp=4).boxes((8, 8))] == [
        [((0, 0), (0, 0), (0, 0), (4, 2)), ((4, 0), (0, 0), (4, 0), (4, 2))],
        [((0, 0), (0, 2), (0, 0), (4, 2)), ((4, 0), (0, 2), (4, 0), (4, 2))],
        [((0, 4), (0, 0), (0, 0), (4, 2)), ((4, 4), (0, 0), (4, 0), (4, 2))],
        [((0, 4), (0, 2), (0, 0), (4, 2)), ((4, 4), (0, 2), (4, 0), (4, 2))],
    ]


def test_a_shard_in_bands_is_planned_band_by_band() -> None:
    index = index_of((12, 4), Box((0, 0), (6, 4)), Box((6, 0), (6, 4)))
    assert reads(index, [Box((4, 0), (1, 4)), Box((5, 0), (3, 4))]) == [
        ((0, 0), (4, 0), (0, 0), (1, 4)),
        ((0, 0), (5, 0), (0, 0), (1, 4)),
        ((6, 0), (0, 0), (1, 0), (2, 4)),
    ]


def test_scalars_and_ranks_without_a_shard() -> None:
    assert reads(index_of((), Box((), ())), [Box((), ())]) == [((), (), (), ())]
    assert reads(index_of((4,), Box((0,), (4,))), []) == []


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex128, torch.float8_e4m3fn])
def test_memory_of_a_piece_begins_as_poison(dtype: torch.dtype) -> None:
    made = StandIn((4, 6), dtype, [Box((0, 0), (2, 6)), Box((2, 0), (2, 3))], Arena())
    assert not made.memory
    [_, place] = [chunk.offsets for chunk in made.__create_chunk_list__()]
    piece = made.__get_tensor_shard__(MetadataIndex("w", place))
    assert (piece.shape, piece.dtype) == ((2, 3), dtype)
    assert set(piece.reshape(-1).view(torch.uint8).tolist()) == {POISON}
    assert list(made.memory) == [1]
    with pytest.raises(LookupError):
        made.__get_tensor_shard__(MetadataIndex("w", [1, 0]))


def test_a_stand_in_computes_nothing() -> None:
    with pytest.raises(NotImplementedError, match="stand-in"):
        StandIn((2,), torch.float32, [], Arena()) + 1


def test_a_dtype_that_torch_lacks_is_named() -> None:
    with pytest.raises(MetadataError, match=r"w is of dtype float3"):
        torch_metadata(index_of((1,), Box((0,), (1,)), dtype="float3"))
