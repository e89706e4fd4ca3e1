"""Run `ckpt` in this process or in one of its own, and look at what it said."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flows.cli.entry import run

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Said:
    """What one command returned and wrote."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Stdout as the one JSON document it must be."""
        return json.loads(self.out)


class Ckpt:
    """`ckpt(*arguments)` runs the command in this process."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *arguments: str | Path) -> Said:
        self._capture.readouterr()
        code = run([str(argument) for argument in arguments])
        said = self._capture.readouterr()
        return Said(code, said.out, said.err)


def ckpt_process(*arguments: str | Path, timeout: float = 120, **environment: str) -> Said:
    """Run the command as a person's shell would, with both streams piped, within ``timeout`` seconds."""
    done = subprocess.run(
        command(*arguments),
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return Said(done.returncode, done.stdout, done.stderr)


def command(*arguments: str | Path) -> list[str]:
    """The command line that runs `ckpt` from any directory that holds the project."""
    return [sys.executable, "-m", "flows.cli", *map(str, arguments)]
