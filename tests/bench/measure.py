"""Whole processes measured beside each other, interleaved: wall and CPU seconds, peak memory, ratios."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass
class Contestant:
    """One command. ``before`` runs untimed ahead of every run, e.g. to remove an old output."""

    name: str
    command: Sequence[str]
    before: Callable[[], None] = lambda: None
    seconds: list[float] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)
    """Peak resident size of each run, in bytes."""
    cpu: list[float] = field(default_factory=list)
    """User and system seconds of each run."""

    def run(self) -> None:
        self.before()
        started = time.perf_counter()
        process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, env=_environment())
        _, status, usage = os.wait4(process.pid, 0)
        self.seconds.append(time.perf_counter() - started)
        self.peak.append(usage.ru_maxrss * 1024)
        self.cpu.append(usage.ru_utime + usage.ru_stime)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{self.name} ended with {process.returncode}")


def _environment() -> dict[str, str]:
    """An installed program's byte code is compiled beforehand: let the round that warms up write it."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def compare(contestants: Sequence[Contestant], anchor: str, rounds: int = 3) -> None:
    """Run all in turn, ``rounds`` times after one warm-up, and print medians beside the anchor's."""
    for number in range(rounds + 1):
        for contestant in contestants:
            contestant.run()
            if number == 0:
                contestant.seconds.clear()
                contestant.peak.clear()
                contestant.cpu.clear()
    base = next(c for c in contestants if c.name == anchor)
    width = max(len(c.name) for c in contestants)
    print(f"{'':{width}}  {'median s':>8}  {'min':>6}  {'max':>6}  {'CPU s':>6}  {'peak MiB':>8}  × {anchor}")
    for c in contestants:
        ratios = [a / b for a, b in zip(c.seconds, base.seconds, strict=True)]
        low, high = min(c.seconds), max(c.seconds)
        print(
            f"{c.name:{width}}  {statistics.median(c.seconds):8.2f}  {low:6.2f}  {high:6.2f}"
            f"  {statistics.median(c.cpu):6.2f}  {max(c.peak) >> 20:8}  {statistics.median(ratios):.2f}"
        )
