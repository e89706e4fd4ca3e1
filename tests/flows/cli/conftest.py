"""Fixtures of the command's tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.flows.cli.ckpt import Ckpt

HOSTILE_KEYS = (
    "\x1b]0;owned\x07title",
    "\x1b[31mred\x1b[0m",
    "\u202egnirts desrever",
    "[bold red]markup[/bold red]",
    ":boom:",
    "line\nbreak",
    "back\rreturn",
    "\x9b5mcsi",
    "zero\u200bwidth",
    "half \ud800 surrogate",
    "w" * 10_000,
    "משקל.שלום",
)


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ckpt:
    """`ckpt("validate", url)` runs a command and gives code, stdout and stderr."""
    # pytest-xdist sets it for its workers; a pipe has no width.
    monkeypatch.delenv("COLUMNS", raising=False)
    return Ckpt(capsys)


@pytest.fixture
def whole(golden_copy: Callable[[str], Path]) -> Path:
    """A checkpoint without a fault."""
    return golden_copy("torch_fsdp2_zstd")


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real checkpoint whose key names attack whoever prints them."""
    import torch
    import torch.distributed.checkpoint as checkpoint

    directory = tmp_path_factory.mktemp("hostile") / "step_1"
    checkpoint.save(
        {key: torch.ones(2) for key in HOSTILE_KEYS},
        storage_writer=checkpoint.FileSystemWriter(directory),
        no_dist=True,
    )
    return directory
