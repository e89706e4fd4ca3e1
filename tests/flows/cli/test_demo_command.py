"""The commands that the demo proposes work when they are typed where it was called."""

import os
import sys
from pathlib import Path

import pytest

from flows.cli.demo_command import program


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the demo was called, with an environment that is not activated; it has gone elsewhere since."""
    script = tmp_path / "here" / ".venv" / "bin" / "ckpt"
    script.parent.mkdir(parents=True)
    script.touch(mode=0o755)
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path / "demo")
    monkeypatch.setenv("PATH", "/usr/bin")
    return tmp_path / "here"


@pytest.mark.parametrize(
    ("called", "typed"),
    [
        (".venv/bin/ckpt", ".venv/bin/ckpt"),
        ("./.venv/bin/ckpt", ".venv/bin/ckpt"),
        ("{here}/.venv/bin/ckpt", ".venv/bin/ckpt"),
    ],
)
def test_an_environment_that_is_not_activated(
    here: Path, monkeypatch: pytest.MonkeyPatch, called: str, typed: str
) -> None:
    monkeypatch.setattr(sys, "argv", [called.format(here=here)])
    assert program(here) == typed
    monkeypatch.setenv("PATH", f"{here}/.venv/bin{os.pathsep}/usr/bin")
    assert program(here) == "ckpt"


def test_from_within_or_beside_the_environment(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = here / ".venv" / "bin" / "ckpt"
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert program(script.parent) == "./ckpt"
    assert program(here.parent / "demo") == str(script)


def test_without_its_script(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/flows/cli/__main__.py"])
    monkeypatch.setattr(sys, "executable", str(here / ".venv" / "bin" / "python"))
    assert program(here) == ".venv/bin/ckpt"
