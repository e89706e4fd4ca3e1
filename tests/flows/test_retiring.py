"""Retention of a real run: what is kept and why, in two phases; nothing is touched that is not known good."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp.errors import SettingsError, UsageError
from dcp.storage import open_store
from flows.retiring import RetireReport, retire_runs
from flows.settings import LifecycleSettings, RunSettings
from flows.status import run_status
from flows.survey import RunSurvey
from tasks.leases import Leases
from tasks.ledger import StepKey
from tasks.publish import set_alias
from tests.support.lifecycle import RUN, SMALL, CrashError, Lifecycle, anywhere, outcomes

KEEP_ONE = '[runs.retire]\nlatest = 1\ntrash = "0s"\ndelete = true\noptions = {}\n'


@pytest.fixture
def here(tmp_path: Path) -> Lifecycle:
    return Lifecycle(str(tmp_path / "place"), tmp_path / "settings")


def decided(report: RetireReport) -> dict[str, tuple[str, str]]:
    [run] = report.runs
    return {decision.step: (decision.action, decision.why) for decision in run.decisions}


def actions(report: RetireReport) -> dict[str, str]:
    return {step: action for step, (action, _) in decided(report).items()}


def present(life: Lifecycle) -> set[str]:
    return {info.name.partition("/")[0] for info in life.source.objects()}


def published(life: Lifecycle, *steps: str, tables: str = KEEP_ONE, **run: Any) -> LifecycleSettings:
    settings = life.settings(tables=tables, **run)
    for step in steps:
        life.save(step)
    life.once(settings)
    return settings


@pytest.mark.parametrize("kind", ["local", "memory", "gs", "s3"])
def test_two_phases(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    life = Lifecycle(anywhere(kind, request, tmp_path), tmp_path / "settings")
    settings = published(life, "step_1", "step_2", "step_3")
    before = life.published.objects()
    for _ in range(2):
        assert actions(retire_runs(settings)) == {"step_1": "trash", "step_2": "trash", "step_3": "keep"}
    assert life.published.objects() == before
    first = retire_runs(settings, apply=True)
    assert all(decision.done == (decision.action == "trash") for decision in first.runs[0].decisions)
    assert present(life) == {"step_1", "step_2", "step_3"}
    assert outcomes(life.once(settings)) == {}
    assert actions(retire_runs(settings)) == {"step_1": "delete", "step_2": "delete", "step_3": "keep"}
    second = retire_runs(settings, apply=True)
    assert second.ok
    assert second.runs[0].freed > 1000
    assert present(life) == {"step_3"}
    assert actions(retire_runs(settings, apply=True)) == {"step_3": "keep"}
    assert {s.step: s.state for s in run_status(settings).runs[0].steps} == {
        "step_1": "retired",
        "step_2": "retired",
        "step_3": "published",
    }
    # What is published stays, nobody is alarmed, and the step can come again.
    assert len(life.manifests()) == 3
    assert (outcomes(life.once(settings)), life.told) == ({}, [])
    life.save("step_1")
    again = outcomes(life.once(settings))
    # On S3 the same bytes are the same step.
    assert again == ({} if kind == "s3" else {"step_1": "published"})


def test_nothing_is_touched_that_is_not_known_to_be_good_and_idle(here: Lifecycle) -> None:
    settings = published(here, "step_1", "step_2", "step_3", "step_8", "step_9")
    here.save("step_4", without=(".metadata",))
    here.save("step_5")
    here.cut("step_5")
    here.once(settings)
    here.save("step_6")
    here.source.replace("logs/x", b"x")
    [key] = here.ledger.keys("step_2")
    set_alias(f"{here.url}/published", RUN, "step_2", key.fingerprint, alias="best")
    assert Leases(here.ledger.store).acquire("step_3") is not None
    retire_runs(settings, apply=True)
    report = retire_runs(settings, apply=True)
    assert {step: why for step, why in decided(report).items() if step != "step_1"} == {
        "step_2": ("keep", "the alias best leads to it"),
        "step_3": ("keep", "a worker is processing it"),
        "step_4": ("keep", "it was never committed"),
        "step_5": ("keep", "it did not validate: torn"),
        "step_6": ("keep", "it is not validated yet"),
        "step_8": ("delete", "its time in the trash is over"),
        "step_9": ("keep", "the alias latest leads to it"),
        "logs": ("keep", "no step of this run"),
    }
    assert present(here) == {f"step_{n}" for n in (2, 3, 4, 5, 6, 9)} | {"logs"}


def test_without_the_setting_nothing_is_deleted(here: Lifecycle) -> None:
    settings = published(here, "step_1", "step_2", tables='[runs.retire]\nlatest = 1\ntrash = "0s"\n')
    for _ in range(3):
        report = retire_runs(settings, apply=True)
    assert decided(report)["step_1"] == ("trash", "deletion is switched off")
    assert present(here) == {"step_1", "step_2"}


def test_what_is_wanted_again_leaves_the_trash(here: Lifecycle) -> None:
    settings = published(here, "step_1", "step_2")
    retire_runs(settings, apply=True)
    wanted = here.settings(tables=KEEP_ONE + 'best = ["step_1"]\n')
    assert decided(retire_runs(wanted, apply=True))["step_1"] == ("keep", "named as one of the best")
    # Its time in the trash begins anew.
    assert actions(retire_runs(settings, apply=True))["step_1"] == "trash"
    assert actions(retire_runs(settings))["step_1"] == "delete"


def test_a_step_saved_again_between_plan_and_deletion_is_not_deleted(
    here: Lifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import retiring

    settings = published(here, "step_1", "step_2")
    retire_runs(settings, apply=True)
    plan = retiring.plan_retirement

    def saved_meanwhile(*args: Any, **kwargs: Any) -> Any:
        decisions = plan(*args, **kwargs)
        here.save("step_1")
        return decisions

    with monkeypatch.context() as patch:
        patch.setattr(retiring, "plan_retirement", saved_meanwhile)
        report = retire_runs(settings, apply=True)
    [failed] = [decision for decision in report.runs[0].decisions if decision.failed]
    assert "written again" in failed.failed
    assert not report.ok
    assert outcomes(here.once(settings)) == {"step_1": "published"}


def _newest_removed(life: Lifecycle) -> None:
    for info in life.source.child("step_2").objects():
        life.source.remove(f"step_2/{info.name}")


def _newest_saved_over(life: Lifecycle) -> None:
    life.save("step_2", without=(".metadata",))


def _led_to(life: Lifecycle) -> None:
    [key] = life.ledger.keys("step_1")
    set_alias(f"{life.url}/published", RUN, "step_1", key.fingerprint, alias="best")


def _taken(life: Lifecycle) -> None:
    assert Leases(life.ledger.store).acquire("step_1") is not None


@pytest.mark.parametrize(
    ("happens", "said"),
    [
        (_newest_removed, "none of the good steps that are kept stands"),
        (_newest_saved_over, "none of the good steps that are kept stands"),
        (_led_to, "the alias best has been led to it"),
        (_taken, "another worker is processing it"),
    ],
)
def test_what_happens_between_plan_and_deletion_may_save_a_step(
    here: Lifecycle,
    monkeypatch: pytest.MonkeyPatch,
    happens: Callable[[Lifecycle], None],
    said: str,
) -> None:
    from flows import retiring

    settings = published(here, "step_1", "step_2")
    retire_runs(settings, apply=True)
    plan = retiring.plan_retirement

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        decisions = plan(*args, **kwargs)
        happens(here)
        return decisions

    monkeypatch.setattr(retiring, "plan_retirement", meanwhile)
    report = retire_runs(settings, apply=True)
    [failed] = [decision.failed for decision in report.runs[0].decisions if decision.failed]
    assert said in failed
    assert (report.ok, "step_1" in present(here)) == (False, True)


@pytest.mark.parametrize("error", [RuntimeError("odd"), UsageError("no such option")])
def test_what_is_wrong_with_one_run_stops_no_other(
    here: Lifecycle, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    from flows import retiring

    other = f'[[runs]]\nname = "other"\nsource = "{here.url}/other"\npublish = "{here.url}/published"\n'
    settings = published(here, "step_1", "step_2", tables="\n".join([KEEP_ONE, other, KEEP_ONE]))
    surveyed = retiring.survey_run

    def odd(run: RunSettings, **how: Any) -> RunSurvey:
        if run.name == "other":
            raise error
        return surveyed(run, **how)

    monkeypatch.setattr(retiring, "survey_run", odd)
    report = retire_runs(settings.model_copy(update={"runs": settings.runs[::-1]}), apply=True)
    assert (report.ok, [run.ok for run in report.runs]) == (False, [False, True])
    assert str(error) in str(report.runs[0].error)
    assert {decision.step: decision.done for decision in report.runs[1].decisions}["step_1"]


def test_what_was_made_of_it_must_still_be_there(here: Lifecycle) -> None:
    settings = published(here, "step_1", "step_2")
    retire_runs(settings, apply=True)
    [key] = here.ledger.keys("step_1")
    here.published.remove(f"step_1/{key.short}/manifest.json")
    [failed] = [d.failed for d in retire_runs(settings, apply=True).runs[0].decisions if d.failed]
    assert "has no manifest" in failed
    assert "step_1" in present(here)


def test_a_deletion_that_died_raises_no_alarm_and_is_finished(
    here: Lifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = published(here, "step_1", "step_2")
    retire_runs(settings, apply=True)
    remove = type(here.source).remove
    removed: list[str] = []

    def dying(store: Any, name: str) -> None:
        if "step_1" in store.url:
            if removed:
                raise CrashError
            removed.append(name)
        remove(store, name)

    with monkeypatch.context() as patch:
        patch.setattr(type(here.source), "remove", dying)
        with pytest.raises(CrashError):
            retire_runs(settings, apply=True)
    assert removed == [".metadata"]
    assert "step_1" in present(here)
    assert outcomes(here.once(settings)) == {}
    assert here.told == []
    assert run_status(settings).runs[0].steps[0].state == "deleting"
    assert decided(retire_runs(settings, apply=True))["step_1"] == ("delete", "its deletion was begun")
    assert present(here) == {"step_2"}
    [key] = here.ledger.keys("step_1")
    assert "retired" in here.ledger.stages(key)


def test_a_deletion_that_died_before_its_last_record_is_recorded(
    here: Lifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = published(here, "step_1", "step_2")
    retire_runs(settings, apply=True)
    with monkeypatch.context() as patch:
        patch.setattr(type(here.source), "prune", _die)
        with pytest.raises(CrashError):
            retire_runs(settings, apply=True)
    retire_runs(settings, apply=True)
    [key] = here.ledger.keys("step_1")
    assert "retired" in here.ledger.stages(key)
    assert actions(retire_runs(settings)) == {"step_2": "keep"}


def _die(*_: object) -> None:
    raise CrashError


def test_credentials_that_may_not_delete_delete_nothing(here: Lifecycle) -> None:
    settings = published(here, "step_1", "step_2")
    retire_runs(settings, apply=True)
    step = Path(here.source.url) / "step_1"
    if os.geteuid() == 0:
        pytest.skip("nothing is forbidden to root")
    step.chmod(0o500)
    report = retire_runs(settings, apply=True)
    step.chmod(0o700)
    assert not report.ok
    assert len(list(step.iterdir())) > 1


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("trash = 1", "should say what to keep"),
        ("latest = 0", "latest: should be greater than or equal to 1"),
        ("latest = 1\ndelete = true", "runs[0].retire.options: missing"),
        ("latests = 1", "unknown setting; did you mean latest?"),
    ],
)
def test_settings_that_say_too_little_are_refused(table: str, said: str, tmp_path: Path) -> None:
    life = Lifecycle("gs://bucket/place", tmp_path)
    with pytest.raises(SettingsError) as raised:
        life.settings(tables=f"[runs.retire]\n{table}\n")
    assert said in str(raised.value)


def test_without_a_policy_there_is_nothing_to_retire(here: Lifecycle) -> None:
    with pytest.raises(UsageError, match=r"\[runs.retire\]"):
        retire_runs(here.settings())


def test_the_time_of_a_commit_counts(here: Lifecycle) -> None:
    table = '[runs.retire]\nnewer_than = "1h"\n'
    here.save("step_1", SMALL)
    old = time.time() - 7200
    for path in (Path(here.source.url) / "step_1").iterdir():
        os.utime(path, (old, old))
    settings = published(here, "step_2", "step_3", tables=table)
    assert actions(retire_runs(settings)) == {"step_1": "trash", "step_2": "keep", "step_3": "keep"}


def test_a_key_is_never_taken_for_another(here: Lifecycle) -> None:
    """A step saved over since it was published is not validated, whatever was known of its older bytes."""
    settings = published(here, "step_1", "step_2")
    here.save("step_1")
    assert decided(retire_runs(settings, apply=True))["step_1"] == ("keep", "it is not validated yet")
    assert all(
        "trashed-1" not in here.ledger.stages(StepKey(k.step, k.fingerprint))
        for k in here.ledger.keys("step_1")
    )
    assert open_store(here.source.url).exists("step_1/.metadata")
