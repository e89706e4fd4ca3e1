"""Published steps that lack tensors: said wherever people look, and told once."""

import os
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from flows.cli.lifecycle_views import show_pass
from flows.cli.output import Output
from flows.cli.status_view import show_status
from flows.report.run_page import render_runs, verdict_of
from flows.report.runs import gather_runs
from flows.report.saving import PAGE
from flows.settings import LifecycleSettings
from flows.status import StepStatus, run_status
from tasks.manifest import published_directory
from tests.support.lifecycle import RUN, SMALL, Lifecycle, outcomes

QUANTIZED = "torch_torchao"
KEY = "model.0.weight"


@pytest.fixture
def here(tmp_path: Path) -> Lifecycle:
    return Lifecycle(str(tmp_path / "place"), tmp_path / "settings")


def problems(life: Lifecycle) -> list[str]:
    return [alert.problem for alert in life.told]


def steps(settings: LifecycleSettings) -> dict[str, StepStatus]:
    return {step.step: step for step in run_status(settings).runs[0].steps}


def test_tensors_that_are_left_out_are_told_once_and_shown_everywhere(
    here: Lifecycle, capsys: pytest.CaptureFixture[str]
) -> None:
    here.save("step_1", QUANTIZED)
    settings = here.settings()
    report = here.once(settings)
    assert (outcomes(report), report.exit_code) == ({"step_1": "published"}, 0)
    said = report.steps[0].partial
    assert said.startswith("checkpoint.pt: ")
    assert f"left out, as {KEY} is left out: it is of a tensor class of its own" in said
    show_pass(Output(), report)
    assert "published, but not all of it: checkpoint.pt: " in capsys.readouterr().out
    [alert] = here.told
    assert (alert.problem, alert.event) == ("partial", "checkpoint.partial")
    assert alert.title == f"[{RUN}] publishes steps that lack some of their tensors"
    assert alert.what == said
    assert "exclude" in alert.advice

    assert steps(settings)["step_1"].partial == said
    page = render_runs(gather_runs(settings), lambda _: None)
    assert "Published in part (1 step): " in page
    show_status(Output(), run_status(settings))
    printed = capsys.readouterr().out
    assert "step_1: published; checkpoint.pt: " in printed
    assert "publishes steps that lack some of their tensors" in printed
    [run] = gather_runs(settings).runs
    assert verdict_of(run).tone == "warn"
    assert "lack some of their tensors" in verdict_of(run).sentence
    [key] = here.ledger.keys("step_1")
    page = here.published.read(f"{published_directory(key)}/{PAGE}", 1 << 26).decode()
    assert "export.skipped-object" in page

    here.save("step_2", QUANTIZED)
    assert here.once(settings).steps[0].partial == said
    assert problems(here) == ["partial"]
    # What a crashed worker left undone is told by the next, and nothing twice.
    [key] = here.ledger.keys("step_2")
    here.ledger.store.remove(f"step_2/{key.fingerprint}/published.json")
    assert outcomes(here.once(settings)) == {"step_2": "published"}
    assert problems(here) == ["partial"]


def test_it_is_over_with_a_step_that_is_whole_and_may_begin_again(here: Lifecycle) -> None:
    settings = here.settings()
    here.save("step_1", QUANTIZED)
    here.once(settings)
    here.save("step_2", SMALL)
    here.once(settings)
    here.once(settings)
    assert problems(here) == ["partial", "recovered"]
    assert here.told[1].title == f"[{RUN}] publishes all tensors again"
    assert not steps(settings)["step_2"].partial
    assert run_status(settings).runs[0].alerts == []
    here.save("step_3", QUANTIZED)
    here.once(settings)
    here.once(settings)
    assert problems(here) == ["partial", "recovered", "partial"]


def test_what_the_settings_exclude_is_not_missed(here: Lifecycle) -> None:
    here.save("step_1", QUANTIZED)
    settings = here.settings(tables='[[runs.exports]]\nexclude = ["model.*.weight"]')
    assert outcomes(here.once(settings)) == {"step_1": "published"}
    assert here.told == []
    assert not steps(settings)["step_1"].partial


def test_numbers_that_a_cast_turned_infinite_are_told_once_for_all_steps(here: Lifecycle) -> None:
    tables = '[[runs.exports]]\nformat = "safetensors"\ndtype = "float16"'
    settings = here.settings(tables=tables)
    for number, large in ((1, "a"), (2, "b")):
        state = {key: torch.full((3,), 1e6 if key == large else 1.0) for key in ("a", "b")}
        place = Path(here.source.url) / f"step_{number}"
        save({**state, "lr": 0.1}, storage_writer=FileSystemWriter(place))
        os.utime(place / ".metadata")
        report = here.once(settings)
        assert outcomes(report) == {f"step_{number}": "published"}
        assert report.steps[0].partial == (
            f"safetensors: 1 tensor with numbers turned infinite, as {large}: 3 of 3 values were finite as "
            "float32 and are infinite as float16"
        )
    assert problems(here) == ["partial"]
