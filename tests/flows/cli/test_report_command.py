"""`ckpt report`: what it writes, what it says, what it refuses."""

import os
import re
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.flows.cli.ckpt import ROOT, Ckpt, command
from tests.support.lifecycle import Lifecycle


def test_a_checkpoints_page_has_a_name_of_its_own(
    ckpt: Ckpt, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(whole.parent)
    said = ckpt("report", whole)
    assert said.code == 0
    assert "Safe to resume" in said.out
    page = whole.parent / f"{whole.name}-report.html"
    assert str(page) in said.out
    assert page.read_text().startswith("<!doctype html>")


def test_json_says_where_and_what(ckpt: Ckpt, whole: Path, tmp_path: Path) -> None:
    next(whole.glob("__1_*")).unlink()
    target = tmp_path / "page.html"
    said = ckpt("report", whole, "-o", target, "--json")
    assert said.code == 0, "the page tells what is wrong; writing it went well"
    document = said.document
    assert document.pop("seconds") > 0
    assert document.pop("errors") > 0
    assert document == {
        "report": str(target),
        "subject": str(whole),
        "kind": "checkpoint",
        "verdict": "Torn",
        "ok": False,
        "warnings": 0,
        "bytes": target.stat().st_size,
    }


def test_quiet_says_nothing(ckpt: Ckpt, whole: Path, tmp_path: Path) -> None:
    said = ckpt("report", whole, "-o", tmp_path / "page.html", "-q", "--scrub")
    assert (said.code, said.out, said.err) == (0, "", "")
    assert "30 tensors read" in (tmp_path / "page.html").read_text()


def test_runs_of_the_settings(ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = Lifecycle(str(tmp_path / "bucket"), tmp_path)
    life.save("step_1")
    settings = life.settings()
    life.once(settings)
    monkeypatch.chdir(tmp_path)
    said = ckpt("report")
    assert said.code == 0
    assert "Healthy" in said.out
    assert "step_1" in (tmp_path / "demo-report.html").read_text()
    assert ckpt("report", "--run", "other").code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["URL", "--run", "demo"],
        ["URL", "--config", "lifecycle.toml"],
        ["--scrub"],
        ["--against", "step_1"],
        ["URL", "--serve", "-o", "gs://bucket/page.html"],
        ["URL", "-o", "."],
    ],
)
def test_what_does_not_go_together_is_refused(
    ckpt: Ckpt, whole: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(whole.parent)
    said = ckpt("report", *(str(whole) if each == "URL" else each for each in arguments))
    assert said.code == 2, said.err
    assert not list(whole.parent.glob("*.html"))


def test_nothing_there_is_no_page(ckpt: Ckpt, tmp_path: Path) -> None:
    said = ckpt("report", tmp_path / "absent", "-o", tmp_path / "page.html")
    assert said.code == 3
    assert not (tmp_path / "page.html").exists()


def test_it_is_served_until_ctrl_c(whole: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    with subprocess.Popen(
        command("report", whole, "-o", target, "--serve"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            [at] = re.findall(r"http://127\.0\.0\.1:\d+/page\.html", line)
            with urllib.request.urlopen(at, timeout=20) as answer:
                assert answer.read() == target.read_bytes()
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
