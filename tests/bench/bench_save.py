"""`BucketWriter` beside torch's `FsspecWriter` at its best settings, saving to a fake GCS server.

python -m tests.bench.bench_save [--megabytes 500] [--rounds 3]

One process that saves without a process group; only the save is timed, in turn, each to a place of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path

from tests.support.gcs import fake_gcs_server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, fake_gcs_server(Path(directory)) as server:
        os.environ["STORAGE_EMULATOR_HOST"] = server.endpoint
        os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
        bucket = server.make_bucket()
        _compare(bucket, arguments.megabytes, arguments.rounds)
        server.drop_bucket(bucket)


def _compare(bucket: str, megabytes: int, rounds: int) -> None:
    import torch
    from torch.distributed.checkpoint import StorageWriter, save
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    from dcp.save import BucketWriter

    count = 40
    state = {f"layer.{n}": torch.randn(megabytes * 1_000_000 // count // 4) for n in range(count)}
    writers: dict[str, Callable[[str], StorageWriter]] = {"BucketWriter": BucketWriter}
    # Its default is one thread and blocks of 5 MiB; these settings were the best of several.
    for threads, block in ((2, 64), (4, 64), (8, 5)):
        writers[f"FsspecWriter, {threads} threads, {block} MiB blocks"] = (
            lambda url, threads=threads, block=block: FsspecWriter(
                url, thread_count=threads, sync_files=False, block_size=block << 20
            )
        )
    taken: dict[str, list[float]] = {name: [] for name in writers}
    for _ in range(rounds):
        for name, make in writers.items():
            started = time.perf_counter()
            with warnings.catch_warnings(action="ignore"):
                save(state, storage_writer=make(f"{bucket}/{uuid.uuid4().hex}"), no_dist=True)
            taken[name].append(time.perf_counter() - started)
    base = statistics.median(taken["BucketWriter"])
    for name, seconds in taken.items():
        median = statistics.median(seconds)
        print(
            f"{name:40} {median:6.2f} s  {megabytes / median:5.0f} MB/s  {median / base:.2f} × BucketWriter"
        )


if __name__ == "__main__":
    main()
