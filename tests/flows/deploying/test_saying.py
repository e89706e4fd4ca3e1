"""What `make deploy-local` says can be piped, copied and typed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.deploying.__main__ import program
from flows.deploying.local import _shown

LINES = """
import sys
from flows.deploying.__main__ import say
for number in range(100_000):
    say("a line")
sys.stderr.write("finished")
"""


def test_a_reader_that_leaves_early_ends_nothing() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LINES], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as done:
        assert done.stdout is not None
        assert done.stdout.readline() == "a line\n"
        done.stdout.close()
        assert done.stderr is not None
        assert done.stderr.read() == "finished"
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("database", "shown"),
    [
        ("sqlite+aiosqlite:////a/place/prefect.db", "sqlite+aiosqlite:////a/place/prefect.db"),
        ("postgresql+asyncpg://me:secret@127.0.0.1:1/db?x=secret", "postgresql+asyncpg://127.0.0.1:1/db"),
    ],
)
def test_a_database_is_shown_as_it_is_but_for_its_secrets(database: str, shown: str) -> None:
    assert _shown(database) == shown


def test_programs_are_named_so_that_they_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = tmp_path / "an env" / "bin"
    scripts.mkdir(parents=True)
    for name in ("python", "prefect"):
        (scripts / name).touch(mode=0o755)
    monkeypatch.setattr("sys.executable", str(scripts / "python"))
    monkeypatch.setenv("PATH", os.defpath)
    assert program("prefect") == f"'{scripts / 'prefect'}'"
    monkeypatch.chdir(tmp_path)
    assert program("prefect") == "'an env/bin/prefect'"
    monkeypatch.setenv("PATH", str(scripts))
    assert program("prefect") == "prefect"
