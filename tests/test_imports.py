"""What is light stays light: which heavy packages an import or a command pulls in."""

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_MAY_USE_TORCH = ("dcp.load", "dcp.save")


def _imported(code: str) -> set[str]:
    """The top-level packages that a fresh interpreter imports while it runs `code`."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (line for line in done.stderr.splitlines() if line.startswith("import time:"))
    return {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}


def _modules(package: str) -> list[str]:
    """Every module under `package`, by its file."""
    found = []
    for path in sorted((_ROOT / package).rglob("*.py")):
        parts = path.relative_to(_ROOT).with_suffix("").parts
        found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


def test_the_probe_sees_an_import() -> None:
    assert {"json", "numpy"} <= _imported("import json, numpy")


def test_importing_dcp_is_light() -> None:
    assert not _imported("import dcp") & {"torch", "numpy", "prefect", "pandas", "fsspec.gcsfs"}


def test_only_planners_and_test_load_need_torch() -> None:
    light = [name for name in _modules("dcp") if not name.startswith(_MAY_USE_TORCH)]
    assert "dcp.index" in light
    assert not _imported("\n".join(f"import {name}" for name in light)) & {"torch", "prefect"}


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "--help"], ["export", "--help"]])
def test_help_is_light(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['ckpt', *{arguments!r}]\n"
        "from flows.cli import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
    )
    assert not _imported(code) & {"torch", "prefect", "numpy", "fsspec"}
