"""Every command's help has examples, and the examples parse; options complete in every shell."""

import inspect
import re
import shlex
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
import typer.main

from flows.cli.command import app
from tests.flows.cli.ckpt import Ckpt, ckpt_process

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def _examples(name: str) -> list[str]:
    """The command lines below ``Example:`` or ``Examples:``."""
    text = inspect.cleandoc(COMMANDS[name].help or "").replace("\b", "")
    _, marker, examples = text.partition("Example")
    assert marker, f"ckpt {name} has no examples"
    return re.findall(r"^ +(ckpt .*)$", examples, re.MULTILINE)


def _all() -> Iterator[tuple[str, str]]:
    for name in COMMANDS:
        for line in _examples(name):
            yield name, line


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_an_example_of_itself(name: str) -> None:
    assert any(line.split()[1] == name for line in _examples(name))


@pytest.mark.parametrize("line", sorted({line for _, line in _all()}))
def test_examples_parse(line: str) -> None:
    words = shlex.split(line.partition(" > ")[0])
    command = COMMANDS[words[1]]
    # Parses as the real call does and calls nothing.
    command.make_context(words[1], words[2:], resilient_parsing=False)


def test_the_version_is_told(ckpt: Ckpt) -> None:
    said = ckpt("--version")
    assert (said.code, said.out, said.err) == (0, f"ckpt {version('ckpt-lifecycle')}\n", "")


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_fits_eighty_columns_and_lists_every_option(
    ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = ckpt(name, "--help")
    assert said.code == 0
    for line in said.out.splitlines():
        assert len(line) <= 80 or line.strip().startswith("ckpt "), line
    for parameter in COMMANDS[name].params:
        for option in parameter.opts:
            if option.startswith("--"):
                assert option in said.out
    for line in _examples(name):
        assert line in said.out


def _complete(shell: str, *words: str) -> set[str]:
    line = " ".join(words)
    environment = {
        "_CKPT_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    said = ckpt_process(**environment)
    assert said.err == ""
    return set(re.findall(r"[\w=.,-]+", said.out))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("ckpt", "exp"), {"export"}),
        (("ckpt", "export", "--max-sh"), {"--max-shard-size"}),
        (("ckpt", "export", "--format", ""), {"torch", "safetensors"}),
        (("ckpt", "export", "--dtype", "b"), {"bfloat16"}),
        (("ckpt", "test-load", "--engine", ""), {"simulated", "gloo"}),
        (("ckpt", "test-load", "--layout", ""), {"fsdp=2", "fsdp=8", "fsdp=4,tp=2"}),
    ],
    ids=lambda value: "-".join(value[1:]) if isinstance(value, tuple) else "",
)
def test_completion(shell: str, words: tuple[str, ...], offered: set[str]) -> None:
    assert offered <= _complete(shell, *words)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_each_shell(shell: str) -> None:
    said = ckpt_process("--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert said.code == 0
    assert f"complete_{shell}" in said.out
