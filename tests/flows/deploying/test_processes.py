"""Daemons are found again by their pids and ended with all they started."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flows.deploying.processes import Daemons, Mark
from tests.support.waiting import until

SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('up', flush=True); time.sleep(300)",
]
PARENT = [
    sys.executable,
    "-c",
    "import subprocess, sys, time;"
    "c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)']);"
    "print(c.pid, flush=True); time.sleep(300)",
]


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    found = Daemons(tmp_path / "processes")
    yield found
    found.stop(found.names())


def _start(daemons: Daemons, name: str, command: list[str]) -> int:
    daemons.start(name, command, env=dict(os.environ), cwd=daemons.directory.parent)
    return Mark.model_validate_json((daemons.directory / f"{name}.json").read_bytes()).pid


def _said(daemons: Daemons, name: str) -> str:
    until(lambda: daemons.log(name).read_text().strip())
    return daemons.log(name).read_text().strip()


def _dead(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_started_found_again_and_ended(daemons: Daemons) -> None:
    pid = _start(daemons, "one", SLEEP)
    again = Daemons(daemons.directory)
    assert again.alive("one", SLEEP)
    assert not again.alive("one", [*SLEEP, "other"])
    assert again.names() == ["one"]
    assert again.stop(["one", "never"]) == ["one"]
    assert _dead(pid)
    assert again.names() == []
    assert again.stop(["one"]) == []


def test_its_children_end_too_even_where_it_died_before(daemons: Daemons) -> None:
    pid = _start(daemons, "parent", PARENT)
    child = int(_said(daemons, "parent"))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not daemons.alive("parent")
    assert not _dead(child)
    daemons.stop(["parent"])
    assert _dead(child)


def test_what_ignores_to_be_ended_is_killed(daemons: Daemons, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.deploying.processes.PATIENCE", 0.5)
    pid = _start(daemons, "stubborn", STUBBORN)
    assert _said(daemons, "stubborn") == "up"
    assert daemons.stop(["stubborn"]) == ["stubborn"]
    assert _dead(pid)


def test_a_pid_that_belongs_to_somebody_else_by_now_is_left_alone(daemons: Daemons) -> None:
    other = subprocess.Popen(SLEEP, start_new_session=True)
    try:
        mark = Mark(pid=other.pid, started=psutil.Process(other.pid).create_time() - 1000, command=SLEEP)
        daemons.directory.mkdir()
        (daemons.directory / "old.json").write_text(mark.model_dump_json())
        assert not daemons.alive("old")
        assert daemons.stop(["old"]) == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_damaged_file_is_no_daemon(daemons: Daemons) -> None:
    daemons.directory.mkdir()
    (daemons.directory / "torn.json").write_text("{")
    assert not daemons.alive("torn")
    assert daemons.stop(["torn"]) == []
    assert daemons.names() == []
