"""An export from a bucket into a bucket beside what raw parallel reads piped into a raw upload take.

python -m tests.bench.bench_bucket_export [--store gs] [--megabytes 384] [--rounds 3]

Whole processes, in turn, against a fake GCS server, or moto's S3. The raw one copies the checkpoint's data
files into one object: ranges of 8 MiB read by eight threads, in order, into gcsfs' (s3fs') own upload in
blocks of 64 MiB. It checks nothing; the export checks every CRC, takes digests and compares checksums.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import uuid
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench.measure import Contestant, compare
from tests.support.gcs import FakeGcs, fake_gcs_server
from tests.support.s3 import MotoS3, moto_server

RANGE = 8 << 20
THREADS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=["gs", "s3"], default="gs")
    parser.add_argument("--megabytes", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--raw", nargs=2, metavar=("SOURCE", "DEST"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.raw:
        _pipe(*arguments.raw)
        return
    with tempfile.TemporaryDirectory() as directory, _server(arguments.store, Path(directory)) as server:
        source, target = f"{server.make_bucket()}/step", server.make_bucket()
        saved = [sys.executable, "-m", "tests.bench.bench_gloo_load", "--save", source]
        subprocess.run([*saved, "--megabytes", str(arguments.megabytes)], check=True)
        _compare(server, source, target, arguments)


@contextmanager
def _server(store: str, directory: Path) -> Iterator[FakeGcs | MotoS3]:
    if store == "gs":
        with fake_gcs_server(directory) as server:
            os.environ["STORAGE_EMULATOR_HOST"] = server.endpoint
            os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
            yield server
        return
    os.environ.update(AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x", AWS_DEFAULT_REGION="us-east-1")
    with moto_server(directory) as moto:
        os.environ["AWS_ENDPOINT_URL"] = moto.endpoint
        yield moto


def _compare(server: Any, source: str, target: str, arguments: argparse.Namespace) -> None:
    def fresh() -> None:
        # The server's memory must not grow with the rounds.
        server.drop_bucket(target)
        server.make_bucket(target.partition("://")[2])

    place = f"{target}/{uuid.uuid4().hex}"
    raw = [sys.executable, "-m", "tests.bench.bench_bucket_export", "--raw", source, f"{place}.raw"]
    ckpt = str(Path(sys.executable).with_name("ckpt"))
    contestants = [
        Contestant("raw copy", raw, fresh),
        Contestant("ckpt export", [ckpt, "export", source, f"{place}.pt", "--quiet"], fresh),
    ]
    print(f"{arguments.store}, {arguments.megabytes} MB, {os.cpu_count()} cores")
    compare(contestants, "raw copy", arguments.rounds)


def _pipe(source: str, dest: str) -> None:
    import fsspec

    files = fsspec.filesystem(source.partition("://")[0], use_listings_cache=False)
    ranges = [
        (path, start, min(start + RANGE, entry["size"]))
        for path, entry in sorted(files.find(source, detail=True).items())
        if path.endswith(".distcp")
        for start in range(0, entry["size"], RANGE)
    ]
    waiting: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(THREADS) as pool, files.open(dest, "wb", block_size=64 << 20) as out:
        for path, start, end in ranges:
            if len(waiting) == 2 * THREADS:
                out.write(waiting.popleft().result())
            waiting.append(pool.submit(files.cat_file, path, start=start, end=end))
        while waiting:
            out.write(waiting.popleft().result())


if __name__ == "__main__":
    main()
