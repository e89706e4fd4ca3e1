"""Runs the training script of the demo on two ranks, as a launcher would, and reads what it reports."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dcp.errors import EnvironmentFault
from flows.demo.place import SavedStep

RANKS = 2
STEPS = (10, 20, 30, 40, 50, 60)
"""The steps that are saved."""
RENAMED_STEP = 50
"""The first step whose keys have other names, because the model was wrapped after step 40."""

_DEADLINE = 300.0
"""Seconds after which a training run that takes ten does not end any more."""


class Training:
    """A running training job; leaving the block ends whatever of it still runs.

    Args:
        out: directory in which step directories appear.
        log: file that takes all output of the ranks.
        lock: a file descriptor that every rank keeps open, so that whoever waits for it waits for them too.
    """

    def __init__(self, out: Path, log: Path, lock: int | None = None) -> None:
        self._out = out
        self._log = log
        self._kept_open = () if lock is None else (lock,)
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._meeting = tempfile.TemporaryDirectory(prefix="ckpt-demo-")

    def __enter__(self) -> Training:
        command = [sys.executable, "-m", "flows.demo.train", str(self._out)]
        command += ["--steps", str(STEPS[-1]), "--save-every", str(STEPS[0])]
        command += ["--wrap-after", str(RENAMED_STEP - STEPS[0])]
        rendezvous = (Path(self._meeting.name) / "ranks").as_uri()
        with self._log.open("wb") as log:
            for rank in range(RANKS):
                self._ranks.append(
                    subprocess.Popen(
                        [*command, "--rendezvous", rendezvous],
                        env=_environment(rank),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        pass_fds=self._kept_open,
                    )
                )
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._ranks:
            process.kill()
            process.wait()
        self._meeting.cleanup()

    def wait(self) -> list[SavedStep]:
        """Wait for the end; what was saved, in order.

        Raises:
            EnvironmentFault: a rank failed or training does not end; names the log.
        """
        deadline = time.monotonic() + _DEADLINE
        while (codes := [process.poll() for process in self._ranks]) != [0] * RANKS:
            if any(codes) or time.monotonic() > deadline:
                why = f"ended with {codes}" if any(codes) else f"did not end within {_DEADLINE:.0f} s"
                raise EnvironmentFault(f"training {why}; its last word in {self._log}: {self._last_line()}")
            time.sleep(0.1)
        lines = self._log.read_text(errors="replace").splitlines()
        return [SavedStep.model_validate_json(line) for line in lines if line.startswith('{"step"')]

    def _last_line(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "nothing"


def _environment(rank: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "OMP_NUM_THREADS": "1",
        # Loopback only, also on machines whose own name does not resolve.
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
