"""The command as a process: start-up, streams, colours, interruption."""

import os
import pty
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli.command import guarded
from flows.cli.output import Output
from tests.flows.cli.ckpt import ROOT, ckpt_process, command

HEAVY = {"torch", "prefect"}


def _imported(*arguments: str | Path) -> set[str]:
    """The top-level packages that a command imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command(*arguments)[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode in (0, 1), done.stderr[-2000:]
    lines = (line for line in done.stderr.splitlines() if line.startswith("import time:"))
    return {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}


def _cpu_seconds(*arguments: str | Path) -> float:
    """CPU time that a command takes, the best of three: what else the machine does shall not matter."""
    taken = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert ckpt_process(*arguments).code == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(taken)


def test_help_starts_at_once() -> None:
    assert not _imported("--help") & {*HEAVY, "numpy", "fsspec", "pydantic", "rich"}
    assert _cpu_seconds("--help") < 0.5


@pytest.mark.parametrize("name", ["inspect", "validate", "contract"])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_looking_at_a_checkpoint_needs_no_torch(name: str, options: list[str], whole: Path) -> None:
    assert not _imported(name, whole, *options) & HEAVY


@pytest.mark.parametrize("name", ["inspect", "validate"])
def test_looking_at_a_small_checkpoint_is_quick(name: str, whole: Path) -> None:
    assert _cpu_seconds(name, whole) < 1.2


def test_the_exit_code_reaches_the_shell(whole: Path) -> None:
    assert ckpt_process("validate", whole).code == 0
    (whole / "__0_0.distcp").unlink()
    assert ckpt_process("validate", whole).code == 1
    assert ckpt_process("validate").code == 2
    assert ckpt_process("validate", whole / "nowhere").code == 3


def test_a_reader_that_goes_away_is_no_failure_to_talk_about(whole: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.Popen(
        command("inspect", whole), cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_full_disk_under_stdout(whole: Path, options: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command("inspect", whole, *options), cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 3
    assert done.stderr.startswith("error: cannot write the output: No space left on device")
    assert "Traceback" not in done.stderr


def _on_a_terminal(*arguments: str | Path, **environment: str) -> str:
    """What the command writes to a terminal of 80 columns."""
    main, other = pty.openpty()
    env = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    env |= {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", **environment}
    process = subprocess.Popen(
        command(*arguments), cwd=ROOT, env=env, stdin=other, stdout=other, stderr=other, close_fds=True
    )
    os.close(other)
    written = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # Linux says so when the last writer is gone
            break
        if not part:
            break
        written += part
    os.close(main)
    assert process.wait(timeout=60) in (0, 1)
    return written.decode()


def test_colours_on_a_terminal_unless_asked_not_to(whole: Path) -> None:
    (whole / "__1_0.distcp").unlink()
    assert "\x1b[" in _on_a_terminal("validate", whole)
    assert "\x1b" not in _on_a_terminal("validate", whole, NO_COLOR="1")
    assert "\x1b" not in ckpt_process("validate", whole, NO_COLOR="").out


def test_hostile_names_on_a_terminal(hostile: Path) -> None:
    shown = _on_a_terminal("inspect", hostile, NO_COLOR="1")
    assert not set(shown) & set("\x1b\x07\x9b\u202e\u200b")
    assert "owned" in shown
    assert "\u200eמשקל.שלום\u200e" in shown, "letters from right to left draw nothing along"


def test_progress_is_shown_on_a_terminal_only(whole: Path, tmp_path: Path) -> None:
    shown = _on_a_terminal("export", whole, tmp_path / "a.pt")
    assert "export \x1b[" in shown
    assert "bytes" in shown or "kB" in shown or "KiB" in shown
    assert "export \x1b[" not in _on_a_terminal("export", whole, tmp_path / "b.pt", "--quiet")
    assert ckpt_process("export", whole, tmp_path / "c.pt").err == ""


def test_a_terminal_without_unicode(whole: Path, hostile: Path) -> None:
    (whole / ".metadata").write_bytes(b"")
    for arguments in (["inspect", hostile], ["validate", whole]):
        said = ckpt_process(*arguments, PYTHONIOENCODING="ascii")
        assert said.code in (0, 1)
        assert said.out.isascii()
        assert said.err == ""


def _fail(_: Output) -> int:
    raise RuntimeError("a defect")


def test_a_defect_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(_fail, Output(), {}) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "error: internal error: RuntimeError: a defect, run again with --debug\n"


def test_a_defect_under_debug_shows_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(_fail, Output(debug=True), {}) == 3
    assert "in _fail" in capsys.readouterr().err


LOGGING = """
import logging, sys
from flows.cli.command import guarded
from flows.cli.output import Output

def body(out):
    logging.getLogger("apprise").setLevel(logging.WARNING)
    for name in ("gcsfs", "apprise", "dcp.storage"):
        try:
            raise OSError("no answer")
        except OSError:
            logging.getLogger(name).exception("out of retries")
        logging.getLogger(name).warning("careful")
    logging.getLogger("fsspec").critical("the end")
    return 0

sys.exit(guarded(body, Output(debug="--debug" in sys.argv), {}))
"""


def test_other_packages_logs_are_for_debugging() -> None:
    def logged(*options: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", LOGGING, *options], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return done.stderr

    assert logged().splitlines() == [
        "ERROR dcp.storage: out of retries",
        "WARNING dcp.storage: careful",
        "CRITICAL fsspec: the end",
    ]
    assert logged("--debug").count("OSError: no answer") == 3


def test_no_more_than_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    def fail_late(out: Output) -> int:
        out.document({"fine": True})
        raise RuntimeError("a defect")

    assert guarded(fail_late, Output(json=True), {}) == 3
    said = capsys.readouterr()
    assert said.out == '{\n  "fine": true\n}\n'
    assert "a defect" in said.err


def test_control_c_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # a storage server that never answers
        silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen(
            command("validate", "gs://bucket/run/step_1"),
            cwd=ROOT,
            env={**os.environ, "STORAGE_EMULATOR_HOST": endpoint},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        connection, _ = silent.accept()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        connection.close()
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
