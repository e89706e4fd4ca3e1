"""`ckpt run`, `watch`, `status`, `publish` and `verify`: exit codes and what they print."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.flows.cli.ckpt import ROOT, Ckpt, Said, ckpt_process, command
from tests.support.harness import PrefectApi
from tests.support.proxy import fault_proxy
from tests.support.train import SavedCheckpoint


@pytest.fixture
def place(fsdp2_checkpoint: SavedCheckpoint, tmp_path: Path) -> Path:
    """A directory with settings and a run of two good steps and an unknown directory."""
    run = tmp_path / "bucket" / "run"
    for step in ("step_1", "step_2"):
        shutil.copytree(fsdp2_checkpoint.path, run / step)
    (run / "notes").mkdir()
    (tmp_path / "lifecycle.toml").write_text(
        'publish = "published"\ninterval = "1s"\n[[runs]]\nname = "demo"\nsource = "bucket/run"\n'
    )
    return tmp_path


def _run(place: Path, step: str) -> Path:
    return place / "bucket" / "run" / step


def _settings(place: Path) -> tuple[str, Path]:
    return "--config", place / "lifecycle.toml"


@pytest.mark.parametrize("name", ["watch", "status"])
def test_settings_that_are_wrong(ckpt: Ckpt, place: Path, name: str) -> None:
    file = place / "lifecycle.toml"
    file.write_text(file.read_text() + "graze_period = 3\n")
    options = ["--once"] if name == "watch" else []
    said = ckpt(name, *options, *_settings(place), "--json")
    assert (said.code, said.document["error"]["class"]) == (2, "SettingsError")
    assert "lifecycle.toml" in said.document["error"]["message"]
    assert "graze_period" in said.document["error"]["message"]
    assert ckpt(name, *options, "--config", place / "absent.toml").code == 2


def test_status_before_anything_happened(ckpt: Ckpt, place: Path) -> None:
    said = ckpt("status", *_settings(place), "--json")
    assert (said.code, said.document["ok"]) == (0, True)
    [run] = said.document["runs"]
    assert [(step["step"], step["state"]) for step in run["steps"]] == [
        ("step_1", "waiting"),
        ("step_2", "waiting"),
    ]
    assert run["unknown"] == ["notes"]
    assert not (place / "published").exists()
    shown = ckpt("status", *_settings(place)).out
    assert "step_1  waiting" in shown
    assert "notes" in shown


def test_status_of_a_source_that_is_gone(ckpt: Ckpt, place: Path) -> None:
    shutil.rmtree(place / "bucket")
    said = ckpt("status", *_settings(place), "--json")
    assert (said.code, said.document["ok"]) == (3, False)
    assert "could not be read" in ckpt("status", *_settings(place)).out
    assert ckpt("status", *_settings(place), "--quiet").err.startswith("error: demo: ")


def test_status_of_a_run_that_is_not_there(ckpt: Ckpt, place: Path) -> None:
    assert ckpt("status", "--run", "nope", *_settings(place)).code == 2


def test_run_of_a_step_that_belongs_to_no_run(ckpt: Ckpt, place: Path, tmp_path: Path) -> None:
    assert ckpt("run", tmp_path / "elsewhere" / "step_1", *_settings(place)).code == 2


def test_publish_by_hand_verify_and_roll_back(ckpt: Ckpt, place: Path) -> None:
    published = {}
    for step in ("step_1", "step_2"):
        file = place / "out" / step / "model.pt"
        file.parent.mkdir(parents=True)
        assert ckpt("export", _run(place, step), file).code == 0
        said = ckpt("publish", file, _run(place, step), *_settings(place), "--json")
        assert (said.code, said.document["first"]) == (0, True), said.err
        published[step] = Path(said.document["url"])
        assert (published[step] / "model.pt").read_bytes() == file.read_bytes()

    assert _aliases(ckpt, place) == {"latest": "step_2"}
    assert ckpt("publish", "--alias", "latest", published["step_1"]).code == 0
    assert ckpt("publish", "--alias", "best", published["step_2"] / "manifest.json").code == 0
    assert _aliases(ckpt, place) == {"latest": "step_1", "best": "step_2"}

    said = ckpt("verify", published["step_1"], "--json")
    assert (said.code, said.document["ok"]) == (0, True)
    again = ckpt("publish", place / "out" / "step_1" / "model.pt", _run(place, "step_1"), *_settings(place))
    assert again.code == 0
    assert "nothing changed" in again.out

    other = place / "out" / "other" / "model.pt"
    other.parent.mkdir()
    assert ckpt("export", _run(place, "step_1"), other, "--include", "model.*").code == 0
    said = ckpt("publish", other, _run(place, "step_1"), *_settings(place))
    assert (said.code, "published already" in said.err) == (2, True)
    assert ckpt("verify", published["step_1"]).code == 0

    with (published["step_1"] / "model.pt").open("r+b") as file_:
        file_.seek(-100, os.SEEK_END)
        file_.write(b"\xff")
    said = ckpt("verify", published["step_1"], "--json")
    assert said.code == 1
    assert [file["problem"] for file in said.document["files"]] == ["sha256"]
    assert "sha256" in ckpt("verify", published["step_1"]).out
    assert "1 of 1 files" in ckpt("verify", published["step_1"], "--quiet").err


def _aliases(ckpt: Ckpt, place: Path) -> dict[str, str]:
    [run] = ckpt("status", *_settings(place), "--json").document["runs"]
    aliases: dict[str, str] = run["aliases"]
    return aliases


def test_what_does_not_validate_is_not_published(ckpt: Ckpt, place: Path) -> None:
    file = place / "model.pt"
    assert ckpt("export", _run(place, "step_1"), file).code == 0
    os.truncate(_run(place, "step_1") / "__1_0.distcp", 2000)
    said = ckpt("publish", file, _run(place, "step_1"), *_settings(place), "--json")
    assert said.code == 1
    assert "files.truncated" in {found["code"] for found in said.document["error"]["findings"]}
    assert not (place / "published").exists()


def test_publish_needs_an_export_and_a_place_to_go(ckpt: Ckpt, place: Path) -> None:
    assert ckpt("publish", place / "nothing.pt", _run(place, "step_1"), *_settings(place)).code == 2
    assert ckpt("publish", place).code == 2
    assert ckpt("publish", place, "--alias", "latest").code == 2


def test_verify_of_what_is_not_published(ckpt: Ckpt, place: Path) -> None:
    said = ckpt("verify", _run(place, "step_1"), "--json")
    assert (said.code, said.document["published"]) == (1, False)
    assert ckpt("verify", place / "nowhere").code == 3


def test_the_life_of_steps(ckpt: Ckpt, place: Path, prefect_api: PrefectApi) -> None:
    def flow(*arguments: str | Path) -> Said:
        return ckpt_process(*arguments, *_settings(place), **prefect_api.env)

    said = flow("run", _run(place, "step_1"), "--json")
    assert (said.code, said.err) == (0, "")
    assert said.document["outcome"] == "published"
    assert ckpt("verify", said.document["published"], "--deep").code == 0

    os.truncate(_run(place, "step_2") / "__1_0.distcp", 2000)
    said = flow("watch", "--once", "--json")
    assert (said.code, said.err) == (1, "")
    [run] = said.document["runs"]
    assert [(step["step"], step["outcome"], step["problem"]) for step in run["steps"]] == [
        ("step_2", "problem", "torn")
    ]
    assert run["unknown"] == ["notes"]

    said = ckpt("watch", "--once", *_settings(place))
    assert (said.code, said.err) == (0, "")
    assert "2 steps with nothing left to do" in said.out

    said = flow("run", _run(place, "step_2"))
    assert (said.code, said.err) == (1, "")
    assert "step_2  torn" in said.out

    shown = ckpt("status", *_settings(place)).out
    assert "step_1  published  ok      ok    ok      ok" in shown
    assert "step_2  torn       failed" in shown
    assert "torn told" in shown

    (_run(place, "step_2") / ".metadata").unlink()
    for file in _run(place, "step_2").iterdir():
        os.utime(file)
    said = flow("run", _run(place, "step_2"), "--quiet")
    assert (said.code, said.out, said.err) == (1, "", "")


def test_watch_goes_on_until_it_is_stopped(place: Path) -> None:
    shutil.rmtree(place / "bucket" / "run")
    (place / "bucket" / "run").mkdir()
    process = subprocess.Popen(
        command("watch", *_settings(place), "--json"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    documents = (json.loads(line) for line in process.stdout)
    passes = [next(documents) for _ in range(2)]
    # Somebody is editing the settings.
    file = place / "lifecycle.toml"
    settings = file.read_text()
    file.write_text(settings.replace("source", "sauce"))
    wrong = next(each for each in documents if "error" in each)["error"]
    assert (wrong["class"], wrong["exit_code"]) == ("SettingsError", 2)
    file.write_text(settings.replace('"demo"', '"renamed"'))
    renamed = next(each for each in documents if "error" not in each)
    assert [run["run"] for run in renamed["runs"]] == ["renamed"]
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (128 + signal.SIGTERM, "")
    assert [each["runs"][0]["ok"] for each in passes] == [True, True]
    assert passes[0]["started"] < passes[1]["started"]


def test_a_watch_outlives_a_prefect_that_is_away(place: Path, prefect_api: PrefectApi) -> None:
    with fault_proxy(prefect_api.url) as proxy:
        proxy.rule = lambda *_: "reset"
        process = subprocess.Popen(
            command("watch", *_settings(place), "--json"),
            cwd=ROOT,
            env={
                **os.environ,
                "PREFECT_API_URL": f"{proxy.endpoint}/api",
                "PREFECT_CLIENT_MAX_RETRIES": "0",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            failed = json.loads(process.stdout.readline())["error"]
            assert "does not answer" in failed["message"]
            assert failed["exit_code"] == 3
            proxy.rule = None
            # A busy server that answers 503 makes a step wait for the next pass: nothing is asked twice here.
            published: set[str] = set()
            for line in process.stdout:
                runs = json.loads(line).get("runs", ())
                steps = [step for run in runs for step in run["steps"]]
                published |= {step["step"] for step in steps if step["outcome"] == "published"}
                if len(published) == 2:
                    break
            assert published == {"step_1", "step_2"}
        finally:
            process.terminate()
            process.communicate(timeout=60)
