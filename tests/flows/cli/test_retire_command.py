"""`ckpt retire`: a table that says why, and nothing done without --apply."""

from pathlib import Path

from tests.flows.cli.ckpt import Ckpt
from tests.support.lifecycle import Lifecycle


def test_it_shows_and_only_does_it_when_told(tmp_path: Path, ckpt: Ckpt) -> None:
    here = Lifecycle(str(tmp_path / "place"), tmp_path / "settings")
    settings = here.settings(tables='[runs.retire]\nlatest = 1\ntrash = "0s"\ndelete = true\n')
    for step in ("step_1", "step_2"):
        here.save(step)
    here.once(settings)
    shown = ckpt("retire", "--config", str(settings.file))
    assert shown.code == 0
    assert "step_1  trash" in shown.out
    assert "nothing keeps it" in shown.out
    assert "a dry run: nothing was written" in shown.out
    for _ in range(2):
        said = ckpt("retire", "--apply", "--json", "--config", str(settings.file))
    document = said.document
    assert (said.code, document["applied"], document["runs"][0]["freed"] > 0) == (0, True, True)
    assert {info.name.partition("/")[0] for info in here.source.objects()} == {"step_2"}
    assert "trash" not in ckpt("retire", "--config", str(settings.file)).out


def test_without_a_policy_it_is_wrong_usage(tmp_path: Path, ckpt: Ckpt) -> None:
    here = Lifecycle(str(tmp_path / "place"), tmp_path / "settings")
    said = ckpt("retire", "--config", here.settings().file)
    assert said.code == 2
    assert "[runs.retire]" in said.err


def test_a_name_among_the_best_that_no_step_has_is_warned_of(tmp_path: Path, ckpt: Ckpt) -> None:
    here = Lifecycle(str(tmp_path / "place"), tmp_path / "settings")
    settings = here.settings(tables='[runs.retire]\nlatest = 1\nbest = ["step_1", "step_0001", "logs"]\n')
    for step in ("step_1", "step_2"):
        here.save(step)
    here.source.replace("logs/x", b"x")
    here.once(settings)
    said = ckpt("retire", "--json", "--config", settings.file)
    [run] = said.document["runs"]
    assert said.code == 0
    assert ["step_0001" in run["warnings"][0], "logs" in run["warnings"][1]] == [True, True]
    assert len(run["warnings"]) == 2
    assert "runs[0].retire.best" in run["warnings"][0]
    warned = ckpt("retire", "--config", settings.file).err
    assert [line.partition(":")[0] for line in warned.splitlines()] == ["warning", "warning"]
