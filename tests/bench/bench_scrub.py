"""A scrub beside the raw speed of reading and one core's CRC-32.

python -m tests.bench.bench_scrub [CHECKPOINT] [--megabytes 1000] [--rounds 5]

Without CHECKPOINT one that FSDP 2 over tensor parallelism 2 saves here.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import dcp
from tests.bench.synthetic import save_2d


def read_raw(files: list[Path]) -> None:
    """Every byte into one reused buffer."""
    buffer = bytearray(4 << 20)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def crc_of_memory(size: int) -> None:
    """CRC-32 of as many bytes that are already in memory."""
    from isal import isal_zlib

    block = bytes(4 << 20)
    value = 0
    for _ in range(size // len(block)):
        value = isal_zlib.crc32(block, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the checkpoint saved here")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = arguments.checkpoint
        if checkpoint is None:
            checkpoint = Path(directory) / "step"
            save_2d(checkpoint, arguments.megabytes)
        _compare(checkpoint, arguments.rounds)


def _compare(checkpoint: Path, rounds: int) -> None:
    files = [path for path in checkpoint.iterdir() if path.suffix == ".distcp"]
    size = sum(path.stat().st_size for path in files)

    def scrub() -> None:
        report = dcp.validate(str(checkpoint), scrub=True, copied=True)
        assert report.ok

    contestants: dict[str, Callable[[], None]] = {
        "raw read": lambda: read_raw(files),
        "CRC-32": lambda: crc_of_memory(size),
        "scrub": scrub,
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, run in contestants.items():
            started = time.perf_counter()
            run()
            if number:
                times[name].append(time.perf_counter() - started)
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        print(f"{name:9} {middle:6.2f} s  {size / middle / 1e9:6.2f} GB/s")
    pairs = zip(times["raw read"], times["CRC-32"], times["scrub"], strict=True)
    ratios = [max(read, crc) / scrubbed for read, crc, scrubbed in pairs]
    print(f"scrub reaches {statistics.median(ratios):.0%} of the slower of the two")


if __name__ == "__main__":
    main()
