"""The commands of README.md are run as they stand there, against real checkpoints where it names buckets."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.flows.cli.ckpt import ROOT, Ckpt, command
from tests.support.harness import PrefectApi
from tests.support.train import SavedCheckpoint

README = (ROOT / "README.md").read_text()
PUBLISHED = re.compile(r"gs://models/published/llama-7b/(step_\d+)/\w{8}")


def _commands(heading: str) -> list[str]:
    """The lines of all blocks of shell below a heading, without their comments."""
    section = README[README.index(f"\n## {heading}\n") + 1 :]
    section = section[: section.index("\n## ")]
    blocks = re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return [line.partition("  #")[0].strip() for line in "".join(blocks).splitlines()]


def test_the_commands_on_one_checkpoint(
    ckpt: Ckpt, golden: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for step in ("bucket/run/step_12000", "step_100", "step_200"):
        shutil.copytree(golden("torch_fsdp_tp_2x2"), step)
    shutil.copy(golden("torch_fsdp_tp_2x2").with_name("torch_fsdp_tp_2x2.expected.pt"), "model.pt")
    [rules] = [text for text in re.findall(r"```toml\n(.*?)```", README, re.DOTALL) if '= "column"' in text]
    Path("tp.toml").write_text(rules.replace(".w1.", ".a.").replace(".w2.", ".b."))
    lines = _commands("One checkpoint")
    assert len(lines) >= 13
    for line in lines:
        said = ckpt(*shlex.split(line.replace("gs://", ""))[1:])
        assert said.code == 0, (line, said)
        assert said.out
    assert {each.name for each in tmp_path.iterdir()} >= {"out.pt", "hf", "step.html"}
    assert ckpt("validate", "bucket/run/step_0").code == 0


@pytest.mark.slow
def test_the_commands_on_a_run(
    fsdp2_checkpoint: SavedCheckpoint, tmp_path: Path, prefect_api: PrefectApi
) -> None:
    for step in ("step_11000", "step_12000"):
        shutil.copytree(fsdp2_checkpoint.path, tmp_path / "training/llama-7b" / step)
    [settings] = [text for text in re.findall(r"```toml\n(.*?)```", README, re.DOTALL) if "[[runs]]" in text]
    settings = re.sub(r"^alerts = .*$", "", settings, flags=re.MULTILINE)
    (tmp_path / "lifecycle.toml").write_text(settings.replace("gs://", ""))
    environment = {**os.environ, **prefect_api.env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = []
    for line in _commands("A run"):
        if "status --watch" in line:
            # It goes on until somebody ends it: tests/flows/cli/test_status_watch.py.
            continue
        there = PUBLISHED.sub(lambda found: _published(tmp_path, found[1]), line).replace("gs://", "")
        done = subprocess.run(
            command(*shlex.split(there)[1:]),
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        ran.append(line.split()[1])
    assert ran == ["watch", "status", "report", "run", "verify", "publish"]
    assert (tmp_path / "run.html").is_file()


def _published(place: Path, step: str) -> str:
    [directory] = (place / "models/published/llama-7b" / step).glob("????????")
    return str(directory)
