"""Every error class and every finding code has advice; commands in it exist."""

import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module

import pytest

import dcp
import flows
import tasks
from dcp.advice import advice_for
from dcp.errors import CheckpointError, CkptError, NotLoadableError
from dcp.findings import CODES, SEVERITY, Code, finding
from tasks.outcomes import StageFailedError
from tests.flows.cli.ckpt import Ckpt


def _classes(kind: type[CkptError]) -> Iterator[type[CkptError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _classes(each)


def _all() -> list[type[CkptError]]:
    """Every class of the tree, wherever it is defined; one only carries a failure between flow runs."""
    for package in (dcp, tasks, flows):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__") and "demo" not in module.name:
                import_module(module.name)
    return sorted(set(_classes(CkptError)) - {CkptError, StageFailedError}, key=lambda kind: kind.__name__)


def test_every_error_class_has_advice() -> None:
    found = _all()
    assert len(found) > 20
    silent = []
    for kind in found:
        # Constructors differ; advice asks for the class and, of checkpoints' errors, for the code.
        error = type(kind.__name__, (kind,), {"__init__": lambda *_: None})()
        if isinstance(error, NotLoadableError):
            error.findings = (finding("tiling.gap", "a hole"),)
        if isinstance(error, CheckpointError):
            error.code = "tiling.gap"
        silent += [] if advice_for(error, "gs://b/step_1") else [kind.__name__]
    assert silent == []


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_advice(code: Code) -> None:
    text = advice_for(code, "gs://b/step_1")
    assert text
    assert "{" not in text
    if SEVERITY[code] == "error":
        assert "ckpt " in text or "cannot" in text, "no command to type next"


@pytest.mark.parametrize(
    "command",
    sorted({each for code in CODES for each in re.findall(r"ckpt [a-z-]+(?: --[a-z-]+)*", advice_for(code))}),
)
def test_a_command_that_is_advised_exists(ckpt: Ckpt, command: str) -> None:
    _, name, *options = command.split()
    said = ckpt(name, "--help")
    assert said.code == 0
    assert [option for option in options if option not in said.out] == []
