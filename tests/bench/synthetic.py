"""Checkpoints of random tensors for benchmarks, saved by real ranks through torch.

`save_2d` writes what FSDP 2 over tensor parallelism 2 writes: matrices cut by rows and columns, and matrices
cut by rows twice.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks

ROWS, COLUMNS = 5120, 1280
_RANKS = 4


def save_2d(directory: Path, megabytes: int) -> None:
    """A checkpoint of float32 matrices, sharded over a mesh of 2 x 2.

    Args:
        directory: where to; it must not exist.
        megabytes: about that many 10^6 bytes in all.
    """
    count = max(2, round(megabytes * 1e6 / (ROWS * COLUMNS * 4)))
    run_ranks(_save, _RANKS, str(directory), count, timeout=600)


def _save(directory: str, count: int) -> None:
    import torch
    from torch.distributed.checkpoint import FileSystemWriter, save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    state = {}
    for number in range(count):
        columns = number % 2
        shape = (ROWS // 2, COLUMNS // 2) if columns else (ROWS // 4, COLUMNS)
        local = torch.empty(shape).normal_()
        state[f"layer.{number}.weight"] = DTensor.from_local(local, mesh, [Shard(0), Shard(columns)])
    save({"model": state}, storage_writer=FileSystemWriter(directory, sync_files=False))
