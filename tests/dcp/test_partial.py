"""Unfinished files: what dead writers left is swept, what living ones write is never touched."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from dcp.storage import open_store
from dcp.storage.partial import FOREIGN_SECONDS, TEMPORARY, make_directory, partial_file

HOLD = """
import sys
from dcp.storage import open_store
with open_store(sys.argv[1]).writer(sys.argv[2]) as sink:
    sink.write(b"unfinished")
    print("ready", flush=True)
    sys.stdin.read()
"""
REPEAT = """
import sys
from dcp.storage import open_store
store = open_store(sys.argv[1])
for number in range(150):
    with store.writer("one") as sink:
        sink.write(sys.argv[2].encode() * 1000)
"""


@contextmanager
def writing(directory: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    """Another process in the middle of writing a file; it ends when its stdin is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    try:
        yield process
    finally:
        process.communicate(timeout=30)


def unfinished(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if TEMPORARY in path.name]


def write(directory: Path, name: str) -> None:
    with open_store(str(directory)).writer(name) as sink:
        sink.write(b"whole")


@pytest.mark.parametrize("name", ["out.pt", "n" * 250, "文" * 80])
def test_what_a_killed_writer_left_is_swept_by_the_next(name: str, tmp_path: Path) -> None:
    with writing(tmp_path, name) as process:
        process.kill()
    [left] = unfinished(tmp_path)
    assert open_store(str(tmp_path)).objects() == []
    write(tmp_path, "other")
    assert unfinished(tmp_path) == [left], "it is none of the other's business"
    write(tmp_path, name)
    assert unfinished(tmp_path) == []


def test_a_whole_directory_is_swept(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with writing(tmp_path, name) as process:
            process.kill()
    assert len(unfinished(tmp_path)) == 2
    with writing(tmp_path, "c"):
        open_store(str(tmp_path)).sweep()
        assert [name.startswith(".c.") for name in unfinished(tmp_path)] == [True]
    open_store(str(tmp_path / "absent")).sweep()


def test_a_living_writer_finishes_beside_another(tmp_path: Path) -> None:
    with writing(tmp_path, "out"):
        write(tmp_path, "out")
        assert (tmp_path / "out").read_bytes() == b"whole"
        assert len(unfinished(tmp_path)) == 1
    assert (tmp_path / "out").read_bytes() == b"unfinished"
    store = open_store(str(tmp_path))
    with store.writer("out") as one:
        one.write(b"first")
        with store.writer("out") as two:
            two.write(b"second")
    assert (tmp_path / "out").read_bytes() == b"first"
    assert unfinished(tmp_path) == []


def test_what_another_machine_left_must_have_rested(tmp_path: Path) -> None:
    foreign = tmp_path / f".out{TEMPORARY}{'0' * 8}-{'1' * 32}"
    stranger = tmp_path / f".out{TEMPORARY}kept"
    foreign.write_bytes(b"x")
    stranger.write_bytes(b"x")
    write(tmp_path, "out")
    assert foreign.exists()
    long_ago = time.time() - FOREIGN_SECONDS - 60
    os.utime(foreign, (long_ago, long_ago))
    write(tmp_path, "out")
    assert not foreign.exists()
    assert stranger.exists()


def test_writers_that_sweep_all_the_time_do_not_hurt_each_other(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", REPEAT, str(tmp_path), letter], stderr=subprocess.PIPE)
        for letter in "abc"
    ]
    for writer in writers:
        _, said = writer.communicate(timeout=120)
        assert writer.returncode == 0, said
    assert unfinished(tmp_path) == []
    assert len(set((tmp_path / "one").read_text())) == 1


def test_an_interruption_at_any_moment_before_writing_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C may come between any two lines."""
    for moment in range(1, 200):
        lines = 0
        writing = False

        def interrupt(frame: FrameType, event: str, _: object) -> Any:
            nonlocal lines
            if not frame.f_code.co_filename.endswith("partial.py"):
                return None
            lines += event == "line"
            if event == "line" and lines == moment:  # noqa: B023 - called in this turn alone
                sys.settrace(None)
                raise KeyboardInterrupt
            return interrupt

        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            with partial_file(tmp_path / "deep" / "out"):
                writing = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        if writing:
            break
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert writing
    assert moment > 10


def test_a_directory_that_others_make_and_remove_is_nobodys_file(tmp_path: Path) -> None:
    wrong: list[str] = []

    def work() -> None:
        for _ in range(1500):
            try:
                make_directory(tmp_path / "c")
            except Exception as error:
                wrong.append(str(error))
            with suppress(OSError):
                (tmp_path / "c").rmdir()

    workers = [threading.Thread(target=work) for _ in range(4)]
    between = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(between)
    assert not wrong
