"""Commands that are asked to end: in order, with nothing half-written left, and without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import until

CKPT = [sys.executable, "-m", "flows.cli"]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that takes a moment: real zip records of 64 MB each."""
    import torch
    import torch.distributed.checkpoint as dist_cp

    step = tmp_path_factory.mktemp("large") / "step_1"
    state = {f"w{n}": torch.zeros(16 << 20) for n in range(4)}
    dist_cp.save(state, checkpoint_id=str(step), no_dist=True)
    return step


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_a_signal_leaves_nothing(number: signal.Signals, form: str, large: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    with subprocess.Popen(
        [*CKPT, "export", str(large), str(dest), "--format", form, "--sha256"],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        until(lambda: list(tmp_path.rglob("*.partial-*")), every=0.002)
        process.send_signal(number)
        _, told = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert "interrupted" in told
    assert "Traceback" not in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("after", [0.1, 0.2, 0.3])
def test_ctrl_c_while_it_starts_prints_no_traceback(after: float, large: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal, threading\n"
        f"threading.Timer({after}, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "from flows.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "export", str(large), str(tmp_path / "x.pt")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in (0, 130)


@pytest.mark.parametrize("options", [[], ["--debug"]])
def test_what_is_half_made_goes_without_a_traceback(options: list[str]) -> None:
    code = (
        "from flows.cli import entry\n"
        "class HalfMade:\n"
        "    def __del__(self): self.never_set.close()\n"
        "entry.run = lambda arguments: (HalfMade(), 0)[1]\n"
        "entry.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "never_set" in done.stderr) == (0, bool(options))


def test_what_is_ignored_stays_ignored(large: Path, tmp_path: Path) -> None:
    """As under nohup."""
    dest = tmp_path / "out.pt"
    with subprocess.Popen(
        [*CKPT, "export", str(large), str(dest), "--sha256"],
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    ) as process:
        until(lambda: list(tmp_path.iterdir()), every=0.002)
        os.kill(process.pid, signal.SIGHUP)
        assert process.wait(60) == 0
    assert dest.exists()
