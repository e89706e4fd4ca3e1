"""What the documents tell people to type can be typed: commands parse, targets, files and links are there."""

import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.exceptions import TyperException

from flows.cli.command import app
from tests.flows.cli.ckpt import ROOT

DOCUMENTS = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "dcp/README.md", "deployments/README.md")
]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
_RUN_ELSEWHERE = ROOT / "dcp" / "README.md"
"""Its commands are not only parsed but run, by tests/dcp/test_guide.py."""
_SHELL = ("for", "done")
_NOT_HERE = ("kubectl",)
"""There is no cluster in a test."""


def commands_of(text: str) -> list[str]:
    """Lines of blocks of shell, and commands with arguments that stand in the text."""
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    wanted = [span for span in spans if re.match(r"(\S*/)?(ckpt|make|prefect|python\S*) \S", span)]
    return [line for line in [*blocks.splitlines(), *wanted] if line.strip()]


COMMANDS = list(
    dict.fromkeys(
        pytest.param(path.relative_to(ROOT).as_posix(), line, id=f"{path.parent.name}-{line[:70]}")
        for path in DOCUMENTS
        if path != _RUN_ELSEWHERE
        for line in commands_of(path.read_text())
    )
)


@pytest.mark.parametrize(("document", "line"), COMMANDS)
def test_it_can_be_typed(document: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    program = Path(words[0]).name if words[0] != "." else "."
    if program == "ckpt":
        _parses(words[1:])
    elif program == "make":
        assert {word for word in words[1:] if "=" not in word and not word.startswith("-")} <= TARGETS
        assert all(f"{name} ?=" in MAKEFILE for name in (w.partition("=")[0] for w in words[1:] if "=" in w))
    elif program.startswith("python"):
        for word in words[1:]:
            if word.endswith(".py") and "/" in word:
                assert (ROOT / word).is_file()
    elif program == "prefect":
        _prefect_takes([word for word in words[1:] if word != "--no-prompt"])
    else:
        assert program in (*_SHELL, *_NOT_HERE), f"{document}: nothing here says whether {line!r} works"


def _parses(arguments: list[str]) -> None:
    group: Any = typer.main.get_command(app)
    if arguments[0].startswith("-"):
        known = {option for parameter in group.params for option in parameter.opts}
        assert arguments[0] in known | {"--help"}
        return
    name, *rest = [word for word in arguments if word != "…"]
    told = ""
    try:
        group.commands[name].make_context(name, [word.strip("[]") for word in rest])
    except TyperException as error:
        told = str(error)
    # A mention in the text may leave values out, but names no option that is not there.
    assert not told or "Missing" in told or "requires an argument" in told, told


def _prefect_takes(words: list[str]) -> None:
    commands = list(itertools.takewhile(lambda word: re.fullmatch(r"[a-z-]+", word), words))
    commands = [word for word in commands if not word.startswith("-")]
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *commands, "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for word in words:
        if word.startswith("-"):
            assert re.search(rf"(^|\s){re.escape(word)}\b", done.stdout), word


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.parent.name)
def test_its_blocks_are_shell(path: Path) -> None:
    for block in re.findall(r"^```sh\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL):
        assert subprocess.run(["bash", "-n"], input=block, text=True, timeout=60).returncode == 0, block


def test_the_check_can_fail() -> None:
    with pytest.raises(AssertionError):
        _parses(["validate", "x", "--no-such-option"])
    with pytest.raises(KeyError):
        _parses(["no-such-command", "x"])
    assert "make demo" in commands_of("```sh\nmake demo\n```\n")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.parent.name)
def test_its_links_lead_somewhere(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_the_picture_of_the_report_is_small() -> None:
    [name] = re.findall(r"!\[[^]]+\]\(([^)]+\.png)\)", (ROOT / "README.md").read_text())
    data = (ROOT / name).read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) <= 200_000
