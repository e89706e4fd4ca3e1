"""The guard kills what holds too much, for real, and otherwise passes everything on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flows.deploying.guard import memory_of
from tests.support.waiting import runs, until

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks into /proc")

MIB = 1 << 20
HOLD = "import sys, time; held = bytearray(int(sys.argv[1])); print('held', flush=True); time.sleep(60)"
CHILD = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)"


def _guarded(limit: int | str, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "flows.deploying.guard", str(limit), *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("through", [(), ("-c", CHILD)], ids=["itself", "its child"])
def test_137_beyond_the_limit(through: tuple[str, ...]) -> None:
    guard = _guarded(100 * MIB, sys.executable, *through, "-c", HOLD, str(200 * MIB))
    _, said = guard.communicate(timeout=60)
    assert guard.returncode == 137
    assert f"{100 * MIB} are allowed; it is killed" in said


def test_what_stays_below_ends_as_it_ends() -> None:
    code = "import sys; held = bytearray(1 << 20); sys.exit(7)"
    guard = _guarded(100 * MIB, sys.executable, "-c", code)
    guard.communicate(timeout=60)
    assert guard.returncode == 7


@pytest.mark.parametrize("limit", ["0", "None"])
def test_no_limit(limit: str) -> None:
    guard = _guarded(limit, sys.executable, "-c", "held = bytearray(300 << 20)")
    guard.communicate(timeout=60)
    assert guard.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_run_ends_with_the_guard(number: signal.Signals) -> None:
    guard = _guarded(0, sys.executable, "-c", HOLD.replace("'held'", "__import__('os').getpid()"), "1")
    assert guard.stdout is not None
    run = int(guard.stdout.readline())
    guard.send_signal(number)
    guard.wait(timeout=60)
    until(lambda: not runs(run))
    assert guard.returncode == (143 if number == signal.SIGTERM else -9)
    guard.communicate()


def test_what_this_process_holds() -> None:
    before = memory_of(os.getpid())
    held = bytearray(64 * MIB)
    held[:: 1 << 12] = b"x" * len(range(0, len(held), 1 << 12))
    assert memory_of(os.getpid()) - before > 60 * MIB
