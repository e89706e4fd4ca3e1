"""What goes wrong with checkpoints in real life, done to two steps of the demo."""

from __future__ import annotations

import os
import time
from pathlib import Path

from flows.demo.place import BrokenStep


def truncate_data(step: Path, number: int) -> BrokenStep:
    """Cut the second rank's data file off in the middle, as a full disk or a broken upload does."""
    [data] = step.glob("__1_*.distcp")
    whole = data.stat().st_size
    os.truncate(data, whole // 2)
    return BrokenStep(step=number, what=f"{data.name} cut off at {whole // 2:,} of {whole:,} bytes")


def interrupt_save(step: Path, number: int, ago: float) -> BrokenStep:
    """Take `.metadata` away, as if the job had died before the commit, ``ago`` seconds in the past.

    Without such times the step would count as one that is still being written.
    """
    (step / ".metadata").unlink()
    then = time.time() - ago
    for path in step.iterdir():
        os.utime(path, (then, then))
    return BrokenStep(step=number, what=f".metadata removed, its files dated back by {ago / 60:.0f} min")
