"""The library's guide is run: its blocks in order, in one empty directory, as a reader would."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dcp
from tests.support.ranks import run_script

GUIDE = Path(dcp.__file__).with_name("README.md").read_text()
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SCRIPT = re.compile(r"# (\w+\.py)\n")
TORCHRUN = re.compile(r"torchrun --nproc-per-node (\d) (\w+\.py)(.*)")
STARTED = "audit.py"
"""The script that torchrun itself starts. The ranks of the other one have imported torch before, which would
be most of what they take."""
TEARDOWN = "terminate called without an active exception"
"""How torch itself ends a rank that has done its work, once in some dozens of times on a busy machine; the
blocks that follow show whether it had."""


@pytest.mark.slow
def test_everything_on_the_page_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = list(BLOCK.finditer(GUIDE))
    assert {block[1] for block in blocks} == {"python", "sh"}
    session: dict[str, object] = {}
    started: list[str] = []
    for block in blocks:
        script = SCRIPT.match(block[2])
        if script:
            Path(script[1]).write_text(block[2])
        elif block[1] == "sh":
            for command in block[2].splitlines():
                ranks, name, arguments = TORCHRUN.fullmatch(command).groups()  # type: ignore[union-attr]
                started.append(name)
                if name == STARTED:
                    shell(command)
                else:
                    run_script(int(ranks), tmp_path, name, *arguments.split())
        else:
            line = GUIDE[: block.start()].count("\n") + 1
            exec(compile("\n" * line + block[2], "dcp/README.md", "exec"), session)
            shown = re.findall(r"^# (.*)$", block[2], re.MULTILINE)
            assert set(shown) <= set(capsys.readouterr().out.splitlines())
    assert started == ["train.py", "train.py", STARTED]


def shell(command: str) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command.split(), env=environment, capture_output=True, text=True, timeout=240)
    raised = f'{command.split()[3]}", line' in done.stderr
    assert done.returncode == 0 or (TEARDOWN in done.stderr and not raised), (
        f"{command}\n{done.stdout}\n{done.stderr}"
    )


def test_it_names_everything_that_is_public() -> None:
    assert not [name for name in dcp.__all__ if f"dcp.{name}" not in GUIDE]


def test_its_table_has_every_module_and_no_other() -> None:
    rows = [row for row in GUIDE[GUIDE.index("## Inside") :].splitlines() if row.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    package = Path(dcp.__file__).parent
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    assert named == modules | {path.parent.name for path in package.glob("*/__init__.py")}
