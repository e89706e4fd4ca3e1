"""JSON documents: exact, one, and valid whatever is in them."""

import json
from pathlib import Path

import pytest
from pydantic import BaseModel

from flows.cli.output import Output


class _Report(BaseModel):
    values: dict[str, float]
    place: Path


def test_a_report_is_valid_json_whatever_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    report = _Report(values={"nan": float("nan"), "\ud800": 1.5, "\u202e": float("inf")}, place=Path("/x"))
    Output(json=True).report(report, lambda: pytest.fail("a person was addressed"))
    out = capsys.readouterr().out
    assert out.isascii()
    assert json.loads(out) == {"values": {"nan": None, "\ud800": 1.5, "\u202e": None}, "place": "/x"}


def test_tables_are_not_cut_when_piped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    Output().table(["A", "B"], [["x" * 300, "1"], ["y", ("2", "error")]], right=["B"])
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"A{' ' * 299}  B", f"{'x' * 300}  1", f"y{' ' * 299}  2"]


def test_a_narrow_table_folds_and_loses_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    Output().table(["A"], [["0123456789" * 5]])
    assert "".join(capsys.readouterr().out.split()) == "A" + "0123456789" * 5


def test_facts_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    Output().facts([("a", "1"), ("long", "2")])
    assert capsys.readouterr().out == "a     1\nlong  2\n"


def test_notes_go_to_stderr_and_quiet_drops_them(capsys: pytest.CaptureFixture[str]) -> None:
    Output(json=True).note("working")
    Output(quiet=True).note("silent")
    Output(quiet=True).warn("silent")
    with Output().progress("export") as report:
        report(1, 2)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "working\n")
