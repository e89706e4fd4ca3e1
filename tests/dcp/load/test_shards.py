"""Runs of rows in strided shards against DTensor's own arithmetic."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.load.shards import strided


@settings(deadline=None)  # the first call imports torch
@given(st.integers(0, 30), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_runs_are_the_rows_that_dtensor_takes(rows: int, factor: int, fsdp: int, tp: int) -> None:
    import torch
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    whole = torch.arange(rows)
    for outer, inner in product(range(fsdp), range(tp)):
        pieces, _ = _StridedShard(0, split_factor=factor)._split_tensor(
            whole, fsdp, with_padding=False, contiguous=False
        )
        shards, _ = Shard(0)._split_tensor(pieces[outer], tp, with_padding=False, contiguous=False)
        runs = strided(strided([(0, rows)], factor, fsdp, outer), 1, tp, inner)
        held = [index for begin, count in runs for index in range(begin, begin + count)]
        assert held == shards[inner].tolist()
