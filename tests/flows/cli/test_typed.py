"""What CONTRIBUTING.md and the operator's guide tell people to type does what they say.

Without a cluster and without Prefect's server: `kubectl` and `prefect` are only parsed, by test_documents.py;
`make deploy-local` is run by tests/flows/test_deploying.py, `ckpt run` by test_readme_runs.py.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flows.cli.ckpt import ROOT, Ckpt
from tests.flows.cli.test_documents import commands_of
from tests.support.lifecycle import Lifecycle

VENV = Path(sys.executable).parent.parent
BENCHMARKS = sorted(path.stem for path in (ROOT / "tests" / "bench").glob("bench_*.py"))


def _make(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run make in a copy of the project's frame with this environment, which is not made anew for it."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, place)
    line = ["make", "-o", f"{VENV}/.installed", f"VENV={VENV}", *words]
    # `make test` tells makes below it where they stand, and they say so.
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(line, cwd=place, env=alone, capture_output=True, text=True, timeout=120)


def test_make_format(tmp_path: Path) -> None:
    file = tmp_path / "untidy.py"
    file.write_text('"""Untidy."""\nimport sys\nimport os\nNAMES = [ os.name,sys.path ]\n')
    done = _make(tmp_path, "format")
    assert done.returncode == 0, done.stdout
    assert file.read_text() == '"""Untidy."""\n\nimport os\nimport sys\n\nNAMES = [os.name, sys.path]\n'


def test_make_bench_runs_all_or_one_and_ends_with_the_first_that_fails(tmp_path: Path) -> None:
    bench = tmp_path / "tests" / "bench"
    bench.mkdir(parents=True)
    for name, code in (("bench_a", "print('a ran')"), ("bench_b", "raise SystemExit(3)"), ("bench_c", "")):
        (bench / f"{name}.py").write_text(code)
    done = _make(tmp_path, "bench")
    assert done.returncode != 0
    assert done.stdout.split("\n")[:3] == ["== bench_a", "a ran", "== bench_b"]
    assert "bench_c" not in done.stdout
    assert _make(tmp_path, "bench", "BENCH=bench_c").stdout.startswith("== bench_c\n")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_can_be_called_without_arguments(name: str) -> None:
    line = [sys.executable, "-m", f"tests.bench.{name}", "--no-such-option"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)
    # Were one required, argparse would say that first.
    assert "unrecognized arguments: --no-such-option" in done.stderr


def test_a_benchmark_measures(golden_path: Path) -> None:
    line = [sys.executable, "-m", "tests.bench.bench_scrub", str(golden_path), "--rounds", "1"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [row.split()[0] for row in done.stdout.splitlines()] == ["raw", "CRC-32", "scrub", "scrub"]


@pytest.fixture
def golden_path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue("golden")("torch_fsdp_tp_2x2")
    return found


def test_the_list_of_pinned_packages() -> None:
    line = [sys.executable, "-m", "pip", "freeze", "--exclude-editable"]
    assert " ".join(line[1:]) in (ROOT / "CONTRIBUTING.md").read_text()
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert {row for row in pinned if row.startswith("torch==")} <= set(
        done.stdout.replace("+cpu", "").split()
    )
    assert "ckpt-lifecycle" not in done.stdout


def test_the_commands_of_the_operators_guide(
    ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Lifecycle(str(tmp_path / "place"), tmp_path / "settings")
    settings = life.settings(tables="[runs.retire]\nlatest = 5\n")
    life.save("step_1")
    [step] = life.once(settings).steps
    places = {
        "STEP_URL": f"{life.source.url}/step_1",
        "PUBLISHED_URL": str(step.published),
        "DEST": str(tmp_path / "out.pt"),
    }
    monkeypatch.chdir(life.directory)
    ran = set()
    for line in commands_of((ROOT / "deployments" / "README.md").read_text()):
        program, *words = shlex.split(line, comments=True)
        if program != "ckpt" or words in (["validate"], ["run", "STEP_URL"]):
            continue
        said = ckpt(*[places.get(word, word) for word in words])
        assert (said.code, "Traceback" in said.err) == (0, False), (line, said)
        ran.add(words[0])
    assert ran == {"export", "status", "validate", "publish", "verify", "watch", "retire"}
