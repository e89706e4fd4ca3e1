"""`ckpt status --watch`: on a terminal it refreshes in place and Ctrl-C is its ordinary end."""

import json
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.flows.cli.ckpt import ROOT, Ckpt, command
from tests.support.lifecycle import Lifecycle


@pytest.fixture
def here(tmp_path: Path) -> Lifecycle:
    life = Lifecycle(str(tmp_path / "place"), tmp_path / "settings")
    life.save("step_1")
    life.settings()
    return life


def _watch(here: Lifecycle, *options: str) -> list[str]:
    file = here.directory / "lifecycle.toml"
    return command("status", "--watch", "--every", "0.2", "--config", file, *options)


class Terminal:
    """What a process wrote to its terminal so far."""

    def __init__(self, controller: int) -> None:
        self._controller = controller
        self.shown = ""

    def until(self, text: str, *, after: int = 0, seconds: float = 60) -> int:
        """Read until ``text`` was written beyond position ``after``; where it ends."""
        deadline = time.monotonic() + seconds
        while text not in self.shown[after:]:
            assert time.monotonic() < deadline, self.shown
            if select.select([self._controller], [], [], 0.5)[0]:
                try:
                    self.shown += os.read(self._controller, 65536).decode()
                except OSError:
                    raise AssertionError(self.shown) from None
        return self.shown.index(text, after) + len(text)


@contextmanager
def on_terminal(arguments: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], Terminal]]:
    """Run a command on a terminal of 120 columns."""
    controller, terminal = pty.openpty()
    environment = {**os.environ, "COLUMNS": "120", "LINES": "40", "TERM": "xterm-256color"}
    process = subprocess.Popen(
        arguments, cwd=ROOT, env=environment, stdin=terminal, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    try:
        yield process, Terminal(controller)
    finally:
        process.kill()
        process.wait()
        os.close(controller)


def test_it_refreshes_in_place_and_ends_well_with_ctrl_c(here: Lifecycle) -> None:
    with on_terminal(_watch(here)) as (process, terminal):
        first = terminal.until("waiting")
        here.save("step_2")
        second = terminal.until("step_2", after=first)
        # The cursor goes up and lines are erased: what was shown is written over.
        assert "\x1b[1A\x1b[2K" in terminal.shown[first:second]
        process.send_signal(signal.SIGINT)
        terminal.until("\x1b[?25h", after=second)
        assert process.wait(timeout=30) == 0
        assert "Traceback" not in terminal.shown


def test_what_happens_meanwhile_does_not_end_it(here: Lifecycle) -> None:
    with on_terminal(_watch(here)) as (_, terminal):
        seen = terminal.until("waiting")
        (Path(here.url) / "train").rename(Path(here.url) / "away")
        seen = terminal.until("could not be read", after=seen)
        (Path(here.url) / "away").rename(Path(here.url) / "train")
        terminal.until("waiting", after=seen)


def test_as_json_it_is_a_document_a_line(here: Lifecycle) -> None:
    with subprocess.Popen(
        _watch(here, "--json"), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        looks = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        assert process.stderr.read() == ""
    assert looks[0]["when"] < looks[1]["when"]
    assert looks[0]["runs"][0]["steps"][0]["state"] == "waiting"


@pytest.mark.parametrize("options", [[], ["--quiet"]])
def test_without_a_terminal_it_refuses(ckpt: Ckpt, here: Lifecycle, options: list[str]) -> None:
    said = ckpt("status", "--watch", "--config", here.directory / "lifecycle.toml", *options)
    assert (said.code, said.out) == (2, "")
    assert "--watch is for a terminal" in said.err


def test_pauses_between_looks_need_looks(ckpt: Ckpt) -> None:
    said = ckpt("status", "--every", "30")
    assert (said.code, said.out) == (2, "")
    assert "ckpt status --watch --every SECONDS" in said.err
