"""What a pass costs that finds nothing to do: `ckpt watch --once` over many finished steps on local disk.

python -m tests.bench.bench_idle_pass [--steps 1000 10000] [--rounds 3]

One step is really processed; the others are hard links of it, of its files and of its records. Whole
processes are timed, imports included; the first pass, which fills the ledger's cache, is not among them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from tests.bench.measure import Contestant, compare
from tests.support.lifecycle import Lifecycle

_PASS = """
import sys
from flows.passes import watch_once
from flows.settings import load_settings
[run] = watch_once(load_settings(sys.argv[1])).runs
assert (run.unchanged, run.steps, run.ok) == (int(sys.argv[2]), [], True), run
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    contestants = []
    with tempfile.TemporaryDirectory() as directory:
        for count in arguments.steps:
            settings = _finished(Path(directory) / str(count), count)
            command = [sys.executable, "-c", _PASS, str(settings), str(count)]
            contestants.append(Contestant(f"{count} finished steps", command))
        compare(contestants, contestants[0].name, arguments.rounds)


def _finished(place: Path, count: int) -> Path:
    """The settings file of a run with so many published steps."""
    life = Lifecycle(str(place / "place"), place / "settings")
    settings = life.settings()
    life.save("step_1")
    assert life.once(settings).steps[0].outcome == "published"
    for root in (Path(life.source.url), Path(life.published.url) / ".ledger"):
        for number in range(2, count + 1):
            shutil.copytree(root / "step_1", root / f"step_{number}", copy_function=os.link)
    (Path(life.published.url) / ".ledger" / "cache.json").unlink(missing_ok=True)
    report = life.once(settings)
    assert report.runs[0].unchanged == count, report
    return settings.file


if __name__ == "__main__":
    main()
