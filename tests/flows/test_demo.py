"""The demo as a new user runs it: real training, real damage, the whole lifecycle, and nothing twice."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dcp.errors import EnvironmentFault
from flows.demo.place import Mark, Place, SavedStep
from flows.demo.training import Training
from flows.settings import load_settings
from tests.flows.cli.ckpt import ROOT, Said, ckpt_process, command

# The first test waits for a demo, which takes half a minute where nothing else is done.
pytestmark = pytest.mark.timeout(900)

GOOD = ("step_10", "step_20", "step_40")
BAD = {"step_30": "torn", "step_50": "key-mismatch", "step_60": "incomplete"}


@dataclass(frozen=True, slots=True)
class Demo:
    """A finished demo: where it is, and what the first call said."""

    root: Path
    said: Said

    @property
    def run(self) -> Path:
        return self.root / "bucket" / "run"

    @property
    def published(self) -> Path:
        return self.root / "published" / "demo"

    def state(self) -> dict[str, tuple[int, int]]:
        """Size and modification time in ns of every file in the bucket and below the publish root."""
        files = [path for top in ("bucket", "published") for path in (self.root / top).rglob("*")]
        return {
            str(path.relative_to(self.root)): (path.stat().st_size, path.stat().st_mtime_ns)
            for path in files
            if path.is_file()
        }

    def artifact(self, step: str) -> Path:
        [file] = self.published.glob(f"{step}/*/checkpoint.pt")
        return file


def _demo(*arguments: str | Path) -> Said:
    return ckpt_process("demo", *arguments, timeout=600)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    root = tmp_path_factory.mktemp("demo") / "ckpt-demo"
    return Demo(root, _demo(root))


@pytest.mark.slow
def test_the_first_call_shows_everything(demo: Demo) -> None:
    assert demo.said.code == 0, demo.said.err
    assert "Traceback" not in demo.said.out + demo.said.err
    for step in GOOD:
        assert f"{step}  published" in demo.said.out
    for step, problem in BAD.items():
        assert f"{step}  {problem}" in demo.said.out
    assert str(demo.published) in demo.said.out
    assert str(demo.root / "lifecycle.toml") in demo.said.out
    assert str(demo.root / "report.html") in demo.said.out


@pytest.mark.slow
def test_its_report_leads_to_every_published_step(demo: Demo) -> None:
    page = (demo.root / "report.html").read_text()
    pages = re.findall(r'<a href="(published/demo/step_\d+/[0-9a-f]{8}/report\.html)">', page)
    assert {each.split("/")[2] for each in pages} == set(GOOD)
    assert all((demo.root / each).is_file() for each in pages)
    for step, problem in BAD.items():
        assert step in page
        assert problem in page


@pytest.mark.slow
def test_it_shows_its_report_beside_prefects_ui(demo: Demo) -> None:
    with subprocess.Popen(
        command("demo", demo.root, "--serve"),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        found: dict[str, str] = {}
        try:
            for line in process.stderr:
                if "http://127.0.0.1:" in line:
                    what, _, url = line.strip().rpartition(" ")
                    found[what.strip()] = url
                if "Ctrl-C" in line:
                    break
            assert found.keys() == {"report", "Prefect's UI"}
            with urllib.request.urlopen(found["report"], timeout=20) as answer:
                assert b"step_40" in answer.read()
            with urllib.request.urlopen(found["Prefect's UI"], timeout=20) as answer:
                assert b"Prefect" in answer.read()
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(found["Prefect's UI"], timeout=5)


@pytest.mark.slow
def test_training_was_real(demo: Demo) -> None:
    mark = json.loads((demo.root / "demo.json").read_text())
    losses = [saved["loss"] for saved in mark["saved"]]
    assert [saved["step"] for saved in mark["saved"]] == [10, 20, 30, 40, 50, 60]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 1.5
    for name in ("__0_0.distcp", "__1_0.distcp"):
        contents = {(demo.run / step / name).read_bytes() for step in GOOD}
        assert len(contents) == len(GOOD)


def _loaded_directly(step: Path) -> dict[str, Any]:
    """Every value of a checkpoint, by torch's own loader."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    _load_state_dict(
        state, storage_reader=FileSystemReader(step), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return state


@pytest.mark.slow
@pytest.mark.parametrize("step", GOOD)
def test_what_is_published_is_what_torch_loads_from_the_checkpoint(demo: Demo, step: str) -> None:
    import torch
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    published, _ = flatten_state_dict(torch.load(demo.artifact(step), weights_only=True))
    expected, _ = flatten_state_dict(_loaded_directly(demo.run / step))
    assert published.keys() == expected.keys()
    assert any(key.startswith("optim.") for key in expected)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert published[key].dtype == value.dtype
            assert torch.equal(published[key], value), key
        else:
            assert published[key] == value


@pytest.mark.slow
def test_bad_steps_are_not_published_and_people_were_told(demo: Demo) -> None:
    for step, problem in BAD.items():
        assert not list(demo.published.glob(f"{step}/*"))
        [alert] = demo.published.glob(f".ledger/{step}/*/alerted.json")
        assert json.loads(alert.read_text())["facts"]["problem"] == problem


@pytest.mark.slow
def test_latest_leads_to_the_newest_good_step(demo: Demo) -> None:
    newest = max((demo.published / "aliases" / "latest").iterdir())
    record = json.loads(newest.read_text())
    assert record["step"] == "step_40"
    assert (demo.published / record["manifest"]).exists()


@pytest.mark.slow
def test_published_steps_verify_and_status_agrees(demo: Demo) -> None:
    for step in GOOD:
        assert ckpt_process("verify", demo.artifact(step).parent, "--quiet").code == 0
    said = ckpt_process("status", "--config", demo.root / "lifecycle.toml", "--json")
    assert said.code == 0
    [run] = said.document["runs"]
    assert {step["step"]: step["problem"] for step in run["steps"]} == {**dict.fromkeys(GOOD), **BAD}


@pytest.mark.slow
def test_a_second_call_does_nothing_and_does_it_quickly(demo: Demo) -> None:
    before = demo.state()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command("demo", demo.root)[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Nothing to do" in done.stdout
    imports = (line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.count("|") == 2)
    assert not {name.split(".")[0] for name in imports} & {"torch", "prefect"}
    assert demo.state() == before


@pytest.mark.slow
def test_a_lost_record_is_made_again_and_nothing_else(demo: Demo) -> None:
    before = demo.state()
    [record] = demo.published.glob(".ledger/step_40/*/published.json")
    record.unlink()
    said = _demo(demo.root, "--json")
    assert said.code == 0, said.err
    assert (said.document["trained"], record.exists()) == (False, True)
    assert [step["step"] for step in said.document["watched"]["runs"][0]["steps"]] == ["step_40"]
    name = str(record.relative_to(demo.root))
    # Later passes read a summary instead of the records; it follows what they hold.
    ledger_cache = "published/demo/.ledger/cache.json"
    after = demo.state()
    for state in (before, after):
        state.pop(name)
        state.pop(ledger_cache, None)
    assert after == before


def test_a_directory_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    said = ckpt_process("demo", tmp_path)
    assert said.code == 2
    assert "holds something else" in said.err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_failing_training_is_one_line_that_names_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    log = tmp_path / "training.log"
    with Training(tmp_path / "run", log) as training, pytest.raises(EnvironmentFault) as failure:
        training.wait()
    said = str(failure.value)
    # Both ranks write to the log, and what they write may mix within the line.
    assert f"{log}: ImportError" in said
    assert "no torch here" in said
    assert "\n" not in said


def test_an_interrupted_training_is_cleared_and_a_finished_one_is_not(tmp_path: Path) -> None:
    place = Place(tmp_path / "demo")
    assert not place.prepare().trained
    assert not place.clear_run()
    (place.run / "step_10").mkdir(parents=True)
    assert not place.prepare().trained
    assert place.clear_run()
    assert not place.run.exists()
    finished = Mark(trained=True, saved=[SavedStep(step=10, loss=1.5)])
    place.keep(finished)
    assert place.prepare() == finished


def test_settings_that_the_user_changed_stay(tmp_path: Path) -> None:
    place = Place(tmp_path / "demo")
    place.prepare()
    settings = load_settings(place.settings)
    assert settings.run("demo").source == str(place.run)
    place.settings.write_text(place.settings.read_text().replace("30s", "45s"))
    place.prepare()
    assert load_settings(place.settings).interval == 45


def test_two_demos_do_not_work_in_one_directory(tmp_path: Path) -> None:
    place = Place(tmp_path / "demo")
    place.prepare()
    with place.alone():
        said = ckpt_process("demo", place.root)
    assert said.code == 2
    assert "another demo is at work" in said.err


def test_control_c_ends_everything_at_once(tmp_path: Path) -> None:
    place = Place(tmp_path / "demo")
    process = subprocess.Popen(
        command("demo", place.root),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("Training on 2 ranks")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
    assert not place.prepare().trained
    with place.alone():  # which no rank keeps any more
        pass
