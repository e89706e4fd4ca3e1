"""A simulated test-load beside torch's own load on as many real gloo ranks, and those with `BucketReader`.

python -m tests.bench.bench_test_load [CHECKPOINT] [--megabytes 500] [--layout fsdp=3]…

Without CHECKPOINT one that FSDP 2 over tensor parallelism 2 saves here. Whole processes are timed. Torch's
ranks only load; the test-load also poisons, checks CRCs and compares.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.measure import Contestant, compare
from tests.bench.synthetic import save_2d

BARS = {"read, bytes needed": 1.02, "faster than torch load": 3.0}
"""At most the one, at least the other; the peak may be the memory budget and `BESIDE`."""
BESIDE = 300 << 20
"""Bytes that torch and the index may take."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--megabytes", type=int, default=500, help="size of the checkpoint saved here")
    parser.add_argument("--layout", action="append")
    parser.add_argument("--memory-budget", type=int, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", choices=["torch", "bucket"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    layouts = arguments.layout or ["fsdp=3", "tp=3"]
    if arguments.ranks:
        print(json.dumps(_load_on_ranks(arguments.checkpoint, layouts[0], arguments.ranks)))
        return
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = arguments.checkpoint
        if checkpoint is None:
            checkpoint = f"{directory}/step"
            save_2d(Path(checkpoint), arguments.megabytes)
        for layout in layouts:
            _compare(checkpoint, layout, arguments.memory_budget, arguments.rounds)


def _compare(checkpoint: str, layout: str, budget: int, rounds: int) -> None:
    target = [checkpoint, "--layout", layout]
    ranks = [sys.executable, "-m", "tests.bench.bench_test_load", *target, "--ranks"]
    command = [str(Path(sys.executable).with_name("ckpt")), "test-load", *target, "--json"]
    commands = {
        "torch load, gloo": [*ranks, "torch"],
        "BucketReader, gloo": [*ranks, "bucket"],
        "ckpt test-load": [*command, "--memory-budget", str(budget)],
    }
    print(f"{layout}, {os.cpu_count()} cores; peak is of the largest process")
    contestants = [Contestant(name, command) for name, command in commands.items()]
    compare(contestants, "ckpt test-load", rounds)
    report = json.loads(_output(commands["ckpt test-load"]))
    [result] = report["layouts"]
    needed = result["bytes_needed"]
    figures = {name: json.loads(_output(line)) for name, line in commands.items() if "--ranks" in line}
    figures["ckpt test-load"] = {"read": result["bytes_read"], "load": report["seconds"]}
    for name, found in figures.items():
        print(
            f"{name:18}  read {found['read'] / needed:.4f} × {needed} bytes needed, "
            f"{found['load']:.2f} s without start-up"
        )
    torch_load, _, ours = contestants
    faster = statistics.median(a / b for a, b in zip(torch_load.seconds, ours.seconds, strict=True))
    read, peak, bound = result["bytes_read"] / needed, max(ours.peak), budget + BESIDE
    for what, value, fine in (
        ("read, bytes needed", f"{read:.4f}", read <= BARS["read, bytes needed"]),
        ("faster than torch load", f"{faster:.2f}", faster >= BARS["faster than torch load"]),
        (f"peak MiB of {bound >> 20}", f"{peak >> 20}", peak <= bound),
    ):
        verdict = "within" if fine else "BEYOND"
        print(f"{what:24}  {value:>8}  {verdict} the bar of {BARS.get(what, bound >> 20)}")
    print()


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _load_on_ranks(checkpoint: str, layout: str, reader: str) -> dict[str, Any]:
    from torch.multiprocessing.spawn import spawn

    from dcp.layout import Layout

    ranks = Layout.parse(layout).ranks
    with tempfile.TemporaryDirectory() as directory:
        spawn(_rank, (checkpoint, layout, reader, directory), nprocs=ranks)
        figures = [json.loads((Path(directory) / str(rank)).read_text()) for rank in range(ranks)]
    return {"read": sum(f["read"] for f in figures), "load": max(f["load"] for f in figures)}


def _rank(rank: int, checkpoint: str, text: str, reader: str, directory: str) -> None:
    import time

    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from dcp.checkpoint import read_index
    from dcp.layout import Layout
    from dcp.load.reader import BucketReader
    from dcp.load.regions import strides

    layout = Layout.parse(text)
    meeting = Path(directory) / "rendezvous"
    dist.init_process_group("gloo", init_method=meeting.as_uri(), rank=rank, world_size=layout.ranks)
    mesh = init_device_mesh("cpu", tuple(size for _, size in layout.axes))
    index = read_index(checkpoint)
    state: dict[str, Any] = {entry.key: None for entry in index.objects}
    for entry in index.tensors:
        local = torch.empty(
            layout.boxes(entry.shape, entry.key)[rank].sizes, dtype=getattr(torch, entry.dtype)
        )
        placements = [
            Replicate() if d is None else Shard(d) for d in layout.shard_dims(entry.shape, entry.key)
        ]
        state[entry.key] = DTensor.from_local(
            local, mesh, placements, shape=torch.Size(entry.shape), stride=strides(entry.shape)
        )
    storage = BucketReader(checkpoint) if reader == "bucket" else FileSystemReader(checkpoint)
    before = _read_so_far()
    started = time.perf_counter()
    load(state, storage_reader=storage)
    figures = {"load": time.perf_counter() - started, "read": _read_so_far() - before}
    (Path(directory) / str(rank)).write_text(json.dumps(figures))


def _read_so_far() -> int:
    """Bytes this process has read from files, as Linux counts them."""
    return int(Path("/proc/self/io").read_text().split()[1])


if __name__ == "__main__":
    main()
