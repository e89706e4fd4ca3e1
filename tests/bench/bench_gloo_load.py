"""Three gloo ranks that load from a fake GCS server, with `BucketReader` and with torch's `FsspecReader`.

python -m tests.bench.bench_gloo_load [--megabytes 384] [--rounds 3]

Two ranks' row shards are loaded by three. Whole groups of processes are timed in turn; both figures count,
since what a reader imports is part of what it costs: of the group as a whole, and of ``load`` alone.
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
from tests.support.gcs import fake_gcs_server

RANKS = 3
TENSORS = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", nargs=3, metavar=("READER", "URL", "DIRECTORY"), help=argparse.SUPPRESS)
    parser.add_argument("--save", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        _spawn(_load, RANKS, arguments.megabytes, *arguments.load)
    elif arguments.save:
        _spawn(_save, 2, arguments.megabytes, arguments.save)
    else:
        _compare(arguments.megabytes, arguments.rounds)


def _compare(megabytes: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name, fake_gcs_server(Path(name)) as server:
        directory = Path(name)
        os.environ["STORAGE_EMULATOR_HOST"] = server.endpoint
        os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
        bucket = server.make_bucket()
        command = [sys.executable, "-m", "tests.bench.bench_gloo_load", "--megabytes", str(megabytes)]
        subprocess.run([*command, "--save", f"{bucket}/step"], check=True)
        contestants = [
            Contestant(reader, [*command, "--load", reader, f"{bucket}/step", str(directory / reader)])
            for reader in ("BucketReader", "FsspecReader")
        ]
        compare(contestants, "BucketReader", rounds)
        taken = {c.name: _figures(directory / c.name)[-rounds:] for c in contestants}
        base = statistics.median(run["load"] for run in taken["BucketReader"])
        for reader, runs in taken.items():
            load = statistics.median(run["load"] for run in runs)
            print(
                f"{reader:12}  load alone {load:.2f} s, {load / base:.2f} ×; {runs[-1]['read']:,} bytes read"
            )


def _figures(directory: Path) -> list[dict[str, float]]:
    """Of every run: the slowest rank's seconds, and the bytes of all."""
    ranks = [
        [json.loads(line) for line in (directory / str(rank)).read_text().splitlines()]
        for rank in range(RANKS)
    ]
    return [
        {"load": max(r["load"] for r in run), "read": sum(r["read"] for r in run)}
        for run in zip(*ranks, strict=True)
    ]


def _spawn(function: Any, ranks: int, megabytes: int, *arguments: str) -> None:
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as meeting:
        spawn(function, ((Path(meeting) / "meeting").as_uri(), ranks, megabytes, *arguments), nprocs=ranks)


def _state(rank: int, meeting: str, ranks: int, megabytes: int, value: float) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from dcp.load.regions import strides

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    rows = megabytes * 1_000_000 // TENSORS // 4096
    own = -(-rows // ranks)
    local = max(0, min(own, rows - rank * own))
    return {
        f"layer.{number}": DTensor.from_local(
            torch.full((local, 1024), value + number),
            mesh,
            [Shard(0)],
            shape=torch.Size((rows, 1024)),
            stride=strides((rows, 1024)),
        )
        for number in range(TENSORS)
    }


def _save(rank: int, meeting: str, ranks: int, megabytes: int, url: str) -> None:
    from torch.distributed.checkpoint import save

    from dcp.save import BucketWriter

    save(_state(rank, meeting, ranks, megabytes, 1.0), storage_writer=BucketWriter(url, files_per_rank=1))


def _load(rank: int, meeting: str, ranks: int, megabytes: int, reader: str, url: str, place: str) -> None:
    import time

    from torch.distributed.checkpoint import load

    state = _state(rank, meeting, ranks, megabytes, 0.0)
    count = [0]
    storage: Any
    if reader == "BucketReader":
        from dcp.load.reader import BucketReader

        storage = BucketReader(url)
    else:
        storage = _counted_fsspec_reader(url, count)
    started = time.perf_counter()
    load(state, storage_reader=storage)
    taken = time.perf_counter() - started
    for number in range(TENSORS):
        if not (state[f"layer.{number}"].to_local() == 1.0 + number).all():
            sys.exit(f"rank {rank} has other values than were saved")
    Path(place).mkdir(exist_ok=True)
    with (Path(place) / str(rank)).open("a") as file:
        read = storage.bytes_read if reader == "BucketReader" else count[0]
        file.write(json.dumps({"load": taken, "read": read}) + "\n")


def _counted_fsspec_reader(url: str, count: list[int]) -> Any:
    """Torch's reader, with the bytes that gcsfs gets counted."""
    from gcsfs import GCSFileSystem
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    read = GCSFileSystem._cat_file_sequential

    async def counting(self: Any, *args: Any, **kwargs: Any) -> bytes:
        data: bytes = await read(self, *args, **kwargs)
        count[0] += len(data)
        return data

    GCSFileSystem._cat_file_sequential = counting
    return FsspecReader(url)


if __name__ == "__main__":
    main()
