"""A tensor larger than the memory budget, whichever way it is sharded: measured, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import dcp
from dcp.storage import open_store
from tests.support.ranks import run_ranks

ROWS, COLUMNS = 1801, 25_001
BUDGET = 120 << 20
EXPORT = """
import sys, dcp
url, dest, format, dtype, budget = sys.argv[1:]
report = dcp.export(url, dest, format=format, dtype=dtype or None, memory_budget=int(budget))
plan = dcp.plan_export(url, dest, format=format, dtype=dtype or None, memory_budget=int(budget))
assert report.peak_memory <= plan.memory <= int(budget), (report.peak_memory, plan.memory)
assert report.bytes_read < 1.001 * plan.bytes, (report.bytes_read, plan.bytes)
"""


def whole(rows: int = ROWS) -> torch.Tensor:
    return torch.arange(rows * COLUMNS, dtype=torch.float32).reshape(rows, COLUMNS)


def _save(place: str, dimension: int) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(whole(), mesh, [Shard(dimension)])}
    save(state, storage_writer=FileSystemWriter(place, sync_files=False))


@pytest.mark.slow
@pytest.mark.parametrize("dimension", [0, 1], ids=["rows", "columns"])
def test_the_budget_holds(dimension: int, tmp_path: Path) -> None:
    assert whole().nbytes > 1.4 * BUDGET
    step = str(tmp_path / "step_1")
    run_ranks(_save, 2, step, dimension)
    for dest, format, dtype in (
        ("out.pt", "torch", ""),
        ("out.safetensors", "safetensors", ""),
        ("half.pt", "torch", "bfloat16"),
    ):
        file = tmp_path / dest
        subprocess.run(
            [sys.executable, "-c", EXPORT, step, str(file), format, dtype, str(BUDGET)],
            check=True,
            timeout=200,
        )
        found = load_file(file)["w"] if format == "safetensors" else torch.load(file, mmap=True)["w"]
        assert torch.equal(found, whole().to(found.dtype))
        file.unlink()


@pytest.mark.slow
def test_what_s3_takes_is_in_the_plan(s3_bucket: str, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    # Larger than all that is under way at once; a larger one takes no more.
    state = {"w": whole(1001)}
    save(state, storage_writer=FileSystemWriter(tmp_path / "step", sync_files=False), no_dist=True)
    store = open_store(f"{s3_bucket}/step")
    for path in (tmp_path / "step").iterdir():
        with store.writer(path.name) as sink:
            sink.write(path.read_bytes())
    for dest in (f"{s3_bucket}/out.pt", str(tmp_path / "out.pt")):
        arguments = [store.url, dest, "torch", "", str(512 << 20)]
        subprocess.run([sys.executable, "-c", EXPORT, *arguments], check=True, timeout=200)


def test_many_tensors_are_in_the_plan(tmp_path: Path) -> None:
    """What a tensor takes beside its bytes, from the index to the report, counts where there are many."""
    from torch.distributed.checkpoint import save

    planned, traced = [], []
    for count in (50, 200, 600):  # the first one loads what is loaded once
        step, out = str(tmp_path / f"step_{count}"), str(tmp_path / f"{count}.safetensors")
        save({f"layer.{i}.w": torch.ones(1) for i in range(count)}, checkpoint_id=step, no_dist=True)
        planned.append(dcp.plan_export(step, out, format="safetensors").memory)
        tracemalloc.start()
        dcp.export(step, out, format="safetensors")
        traced.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert planned[2] - planned[1] >= traced[2] - traced[1] > 400 * 1000
