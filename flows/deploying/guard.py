"""A program that runs one flow run and kills it when it holds more memory than it may.

``python -m flows.deploying.guard BYTES`` runs ``python -m prefect.engine`` and ends as that does, or with
137, as a container would, where the run and what it started held more than BYTES of memory of their own.
BYTES is 0 for no limit. It looks several times a second: enough for an export, whose memory grows by bands.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

PERIOD = 0.1
"""Seconds between two looks."""
KILLED = 128 + signal.SIGKILL

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Run the engine; its exit code."""
    most = int(float(arguments[0])) if arguments and arguments[0] not in ("", "None", "null") else 0
    command = arguments[1:] or [sys.executable, "-m", "prefect.engine"]
    # The worker knows this process only: what becomes of it must become of the run.
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def die_with_parent() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    engine = subprocess.Popen(command, preexec_fn=die_with_parent)

    def forward(number: int, _frame: FrameType | None) -> None:
        engine.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    while True:
        try:
            code = engine.wait(timeout=PERIOD)
        except subprocess.TimeoutExpired:
            held = memory_of(engine.pid) if most else 0
            if held <= most:
                continue
            sys.stderr.write(f"the run holds {held} bytes of memory, {most} are allowed; it is killed\n")
            _kill(engine)
            return KILLED
        return code if code >= 0 else 128 - code


def memory_of(pid: int) -> int:
    """Bytes of memory that a process and its descendants hold, without what files can be read again for."""
    return sum(_held(each) for each in _family(pid))


def _family(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            try:
                found += [int(child) for child in children.read_text().split()]
            except OSError:
                continue  # the thread has just ended
    return found


def _held(pid: int) -> int:
    total = 0
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0  # it has just ended
    for line in lines:
        if line.startswith(("RssAnon:", "RssShmem:")):
            total += int(line.split()[1]) << 10
    return total


def _kill(engine: subprocess.Popen[bytes]) -> None:
    for pid in reversed(_family(engine.pid)):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    engine.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
