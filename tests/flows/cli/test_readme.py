"""What README.md shows exists: its settings load, its commands and options are there."""

import re
import shlex
from pathlib import Path

import pytest

from flows.cli.command import app
from flows.settings import load_settings
from tests.flows.cli.ckpt import ROOT, Ckpt

README = (ROOT / "README.md").read_text()
COMMANDS = [line.partition("#")[0].strip() for line in README.splitlines() if line.startswith("ckpt ")]
NAMES = [command.name for command in app.registered_commands]


def test_its_settings_load(tmp_path: Path) -> None:
    settings, *others = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    file = tmp_path / "lifecycle.toml"
    tables = [other for other in others if other.startswith("[runs.")]
    file.write_text("\n".join([settings, *tables]))
    run = load_settings(file).run("llama-7b")
    assert run.publish == "gs://models/published"
    assert [export.name for export in run.exports] == ["model.pt"]
    assert run.after_publish is not None
    assert run.retire is not None
    assert (run.retire.latest, run.retire.newer_than, run.retire.delete) == (5, 604_800, True)


@pytest.mark.parametrize("line", COMMANDS)
def test_its_commands_take_what_they_are_given(ckpt: Ckpt, line: str) -> None:
    _, name, *arguments = shlex.split(line)
    said = ckpt(name, "--help")
    assert said.code == 0
    for argument in arguments:
        if argument.startswith("-"):
            assert re.search(rf"(^|\s){re.escape(argument)}\b", said.out), argument


def test_its_table_has_every_command_and_no_other() -> None:
    assert re.findall(r"^\| `ckpt ([a-z-]+)", README, re.MULTILINE) == NAMES
