"""Status says where each step stands, from the ledger alone, and writes nothing."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.report.runs import gather_runs
from flows.status import RunStatus, StepStatus, run_status
from tasks.leases import Leases
from tasks.publish import set_alias
from tasks.sinks import sink_name
from tests.flows.cli.ckpt import Ckpt
from tests.support.lifecycle import OTHER_KEYS, RUN, CrashError, Lifecycle, anywhere
from tests.support.web import webhook


@pytest.fixture
def here(tmp_path: Path) -> Lifecycle:
    return Lifecycle(str(tmp_path / "place"), tmp_path / "settings")


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str]) -> Ckpt:
    return Ckpt(capsys)


def steps_of(status: RunStatus) -> dict[str, StepStatus]:
    return {step.step: step for step in status.steps}


@pytest.mark.parametrize("kind", ["local", "gs"])
def test_every_state_is_told_apart(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    life = Lifecycle(anywhere(kind, request, tmp_path), tmp_path / "settings")
    settings = life.settings()
    life.save("step_1")
    life.save("step_2", without=(".metadata",))
    life.save("step_3")
    life.cut("step_3")
    life.save("step_4")
    life.source.replace("logs/x", b"x")
    life.once(settings)
    for info in life.source.child("step_4").objects():
        life.source.remove(f"step_4/{info.name}")
    set_alias(f"{life.url}/published", RUN, "step_1", _key(life, "step_1"), alias="best")
    life.save("step_10")
    before = [(o.name, o.identity) for o in life.published.objects()]
    report = run_status(settings)
    assert [(o.name, o.identity) for o in life.published.objects()] == before
    [run] = report.runs
    steps = steps_of(run)
    assert [step.step for step in run.steps][:3] == ["step_1", "step_2", "step_3"]
    assert {name: step.state for name, step in steps.items() if name != "step_4"} == {
        "step_1": "published",
        "step_2": "problem",
        "step_3": "problem",
        "step_10": "waiting",
    }
    assert steps["step_4"].state == "published"
    assert steps["step_4"].aliases == ["latest"]
    assert run.aliases == {"best": "step_1", "latest": "step_4"}
    assert str(run.latest).endswith("/manifest.json")
    assert run.unknown == ["logs"]
    one, torn = steps["step_1"], steps["step_3"]
    assert set(one.stages.values()) == {"done"}
    assert one.published is not None
    assert one.published.endswith(f"/{RUN}/step_1/{str(one.fingerprint)[:8]}")
    assert (one.errors, one.attempts, one.aliases) == (0, 0, ["best"])
    assert one.bytes > 1000
    assert one.age is not None
    assert (torn.problem, torn.attempts, torn.stages["validate"]) == ("torn", 1, "failed")
    assert torn.errors >= 1
    assert [(alert.problem, alert.state) for alert in torn.alerts] == [("torn", "delivered")]
    assert report.ok


def _key(life: Lifecycle, step: str) -> str:
    [key] = life.ledger.keys(step)
    return key.fingerprint


def test_a_step_that_is_being_written_and_one_that_fails(here: Lifecycle) -> None:
    here.save("step_1")
    here.once(here.settings(tables="[[runs.exports]]\nmemory_budget = 1\n"))
    here.save("step_2", without=(".metadata",))
    [run] = run_status(here.settings(grace_period="1h")).runs
    failing, writing = run.steps
    assert (failing.state, failing.problem, failing.attempts) == ("failing", "export", 1)
    assert failing.stages == {
        "validate": "done",
        "test-load": "done",
        "export": "failed",
        "publish": "open",
    }
    assert writing.state == "writing"


def test_a_broken_sink_is_visible(here: Lifecycle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.sinks._TRIES", 1)
    with webhook() as sink:
        sink.broken = True
        settings = here.settings(alerts=[sink.url])
        here.save("step_1", without=(".metadata",))
        here.once(settings)
        [step] = run_status(settings).runs[0].steps
        assert [(alert.state, alert.deliveries) for alert in step.alerts] == [("failed", 1)]


def test_each_sink_has_the_outcome_of_its_last_alert(
    here: Lifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.sinks._TRIES", 1)
    with webhook() as good, webhook() as bad:
        settings = here.settings('resend_after = "0s"', alerts=[good.url, bad.url])
        here.save("step_1", without=(".metadata",))
        assert [sink.state for sink in run_status(settings).runs[0].sinks] == ["never", "never", "never"]
        bad.broken = True
        here.once(settings)
        [run] = run_status(settings).runs
        assert [alert.state for alert in run.steps[0].alerts] == ["partly"]
        [event, first, second] = run.sinks
        assert (event.sink, event.state) == ("prefect-event", "delivered")
        assert (first.sink, first.state, first.step) == (sink_name(good.url), "delivered", "step_1")
        assert (second.state, second.problem) == ("failed", "incomplete")
        assert second.error
        bad.broken = False
        here.once(settings)
        [run] = run_status(settings).runs
        assert [sink.state for sink in run.sinks] == ["delivered"] * 3
        assert [alert.state for alert in run.steps[0].alerts] == ["delivered"]


def test_who_is_at_work_is_shown_and_nothing_is_written(here: Lifecycle) -> None:
    settings = here.settings()
    here.save("step_1")
    here.once(settings)
    here.save("step_2")
    lease = Leases(here.ledger.store).acquire("step_2")
    assert lease is not None
    before = [(o.name, o.identity) for o in here.published.objects()]
    [run] = run_status(settings).runs
    [held] = run.leases
    assert (held.step, held.state, held.who.rpartition(":")[2]) == ("step_2", "alive", str(os.getpid()))
    assert [step.state for step in run.steps] == ["published", "in-progress"]
    later = run_status(settings, clock=lambda: time.time() + settings.lease_expiry + 1)
    assert [lease.state for lease in later.runs[0].leases] == ["silent"]
    assert [(o.name, o.identity) for o in here.published.objects()] == before


def test_a_run_that_stopped_saving_is_stalled(here: Lifecycle) -> None:
    settings = here.settings(stall_minimum="10m")
    for number in (1, 2):
        here.save(f"step_{number}")
    assert run_status(settings).runs[0].saving.state == "unknown"
    here.save("step_3")
    saving = run_status(settings).runs[0].saving
    assert (saving.state, saving.last) == ("healthy", "step_3")
    saving = run_status(settings, clock=lambda: time.time() + 3600).runs[0].saving
    assert saving.state == "stalled"
    assert saving.quiet is not None
    assert 3600 <= saving.quiet < 3700


def test_a_vanished_sender_is_visible(here: Lifecycle, monkeypatch: pytest.MonkeyPatch) -> None:
    here.save("step_1", without=(".metadata",))

    def die(*_: object) -> None:
        raise CrashError

    monkeypatch.setattr("tasks.alert._deliver", die)
    with pytest.raises(CrashError):
        here.once(here.settings())
    [step] = run_status(here.settings()).runs[0].steps
    assert [(alert.state, alert.deliveries) for alert in step.alerts] == [("sending", 0)]


def test_a_step_that_vanished_unpublished_is_gone(here: Lifecycle) -> None:
    settings = here.settings()
    here.save("step_1", without=(".metadata",))
    here.save("step_2")
    here.once(settings)
    for info in here.source.child("step_1").objects():
        here.source.remove(f"step_1/{info.name}")
    (Path(here.source.url) / "step_1").rmdir()
    assert {name: s.state for name, s in steps_of(run_status(settings).runs[0]).items()} == {
        "step_1": "gone",
        "step_2": "published",
    }


def test_all_that_is_published_of_a_step_that_was_saved_again_is_shown(here: Lifecycle, ckpt: Ckpt) -> None:
    settings = here.settings()
    here.save("step_1")
    here.once(settings)
    first = _key(here, "step_1")
    here.save("step_1", OTHER_KEYS)
    here.once(settings)
    old, new = run_status(settings).runs[0].steps
    assert (old.state, old.fingerprint, old.aliases) == ("replaced", first, [])
    assert (new.state, new.aliases) == ("published", ["latest"])
    assert old.published != new.published
    set_alias(f"{here.url}/published", RUN, "step_1", first, alias="latest")
    old, new = run_status(settings).runs[0].steps
    assert (old.aliases, new.aliases) == (["latest"], [])
    shown = ckpt("status", "--config", settings.file).out
    assert [line.split()[:2] for line in shown.splitlines() if line.startswith("step_1 ")] == [
        ["step_1", "replaced"],
        ["step_1", "published"],
    ]
    assert f"stays published as {old.published}" in shown
    [page] = gather_runs(settings).runs
    assert page.latest is not None
    assert (page.latest.state, page.counts) == ("replaced", {"replaced": 1, "published": 1})

    # Neither a save that is torn nor the step's removal takes it out of sight.
    here.save("step_1")
    here.cut("step_1")
    here.once(settings)
    assert [step.state for step in run_status(settings).runs[0].steps] == ["replaced", "replaced", "problem"]
    for info in here.source.objects():
        here.source.remove(info.name)
    here.save("step_2")
    assert [step.state for step in run_status(settings).runs[0].steps] == ["replaced", "published", "waiting"]


def test_a_run_that_cannot_be_read_says_why(here: Lifecycle) -> None:
    report = run_status(here.settings())
    assert not report.ok
    assert "nothing at" in str(report.runs[0].error)


def test_status_loads_neither_prefect_nor_torch(here: Lifecycle) -> None:
    here.save("step_1")
    settings = here.settings()
    here.once(settings)
    code = """
import sys
from flows.passes import watch_once
from flows.settings import load_settings
from flows.status import run_status
from tasks.publish import verify
settings = load_settings(sys.argv[1])
[step] = run_status(settings).runs[0].steps
assert verify(step.published).ok
assert watch_once(settings).runs[0].unchanged == 1
print(sorted({"torch", "prefect", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(settings.file)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
