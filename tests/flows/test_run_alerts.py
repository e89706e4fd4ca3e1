"""A run that stops saving, junk that piles up, keys that change on purpose, steps that come late."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from dcp.errors import ForbiddenError, UsageError
from dcp.sizes import human_bytes
from dcp.storage.local import LocalStore
from flows.lifecycle import process_step
from flows.passes import watch_once
from flows.report.run_page import render_runs, verdict_of
from flows.report.runs import gather_runs
from flows.status import run_status
from flows.unnoted import Unnoted
from flows.workshop import Workshop
from tasks.ledger import Ledger, timestamp
from tests.support.lifecycle import OTHER_KEYS, RUN, Lifecycle, outcomes
from tests.support.web import webhook

HOUR = 3600.0


@pytest.fixture
def here(tmp_path: Path) -> Lifecycle:
    return Lifecycle(str(tmp_path / "place"), tmp_path / "settings")


def aged(life: Lifecycle, step: str, seconds: float) -> None:
    """Date every file of a step back."""
    then = time.time() - seconds
    for info in life.source.child(step).objects():
        os.utime(Path(life.source.url) / step / info.name, (then, then))


def saved(life: Lifecycle, step: str, ago: float, **how: Any) -> None:
    life.save(step, **how)
    aged(life, step, ago)


def test_a_run_that_stops_saving_is_told_once_and_its_recovery_once(here: Lifecycle) -> None:
    settings = here.settings()
    for number in range(4):
        saved(here, f"step_{number}", 10 * HOUR - number * HOUR)
    # The last commit was seven hours ago, and one an hour is usual.
    for _ in range(3):
        here.once(settings)
    [alert] = here.told
    assert (alert.problem, alert.event, alert.resource) == (
        "stalled",
        "checkpoint.stalled",
        f"checkpoint.{RUN}",
    )
    assert alert.title == f"[{RUN}] saves no more: nothing for 7 h after step_3"
    assert "usual between two is 60 min" in alert.what
    assert alert.command.startswith(f"ckpt status --run {RUN} --config ")
    assert "lifecycle.toml: runs[0].stall_factor = 0" in alert.advice
    status = run_status(settings).runs[0]
    assert [(told.problem, told.state) for told in status.alerts] == [("stalled", "delivered")]
    assert watch_once(settings).runs[0].unchanged == 4

    saved(here, "step_4", 60)
    for _ in range(3):
        here.once(settings)
    assert [alert.problem for alert in here.told] == ["stalled", "recovered"]
    assert here.told[1].title == f"[{RUN}] saves again"
    assert run_status(settings).runs[0].alerts == []
    # Another stall is told anew.
    aged(here, "step_4", 6 * HOUR)
    here.once(settings)
    assert [alert.problem for alert in here.told] == ["stalled", "recovered", "stalled"]


@pytest.mark.parametrize("run", [{"stall_factor": 0}, {"copied": True}, {"stall_minimum": "8h"}])
def test_where_no_stall_is_to_be_told(here: Lifecycle, run: dict[str, Any]) -> None:
    for number in range(4):
        saved(here, f"step_{number}", 10 * HOUR - number * HOUR)
    here.once(here.settings(**run))
    assert here.told == []


def test_steps_that_were_removed_still_tell_the_rhythm(here: Lifecycle) -> None:
    for number in range(4):
        saved(here, f"step_{number}", 10 * HOUR - number * HOUR)
    here.once(here.settings(stall_factor=10))
    for number in range(3):
        for info in here.source.child(f"step_{number}").objects():
            here.source.remove(f"step_{number}/{info.name}")
        (Path(here.source.url) / f"step_{number}").rmdir()
    assert here.told == []
    here.once(here.settings())
    assert [alert.problem for alert in here.told] == ["stalled"]


def test_junk_is_told_once_until_it_doubles_and_when_it_is_gone(here: Lifecycle) -> None:
    one = sum(info.size for info in _sizes(here))
    settings = here.settings(junk_size=int(1.5 * one), junk_age="1h")
    saved(here, "step_1", 5 * HOUR, without=(".metadata",))
    saved(here, "step_2", 60, without=(".metadata",))
    here.once(settings)
    assert "junk" not in [alert.problem for alert in here.told]
    saved(here, "step_2", 2 * HOUR, without=(".metadata",))
    for _ in range(2):
        here.once(settings)
    junk = [alert for alert in here.told if alert.problem == "junk"]
    assert len(junk) == 1
    assert "in 2 uncommitted steps" in junk[0].title
    assert f"has {human_bytes(2 * one)} of junk" in junk[0].title
    assert junk[0].what.startswith(f"{human_bytes(2 * one)} in steps")
    assert "step_1, step_2" in junk[0].what
    for number in (3, 4):
        saved(here, f"step_{number}", 2 * HOUR, without=(".metadata",))
    here.once(settings)
    assert [alert.problem for alert in here.told].count("junk") == 2
    for info in here.source.objects():
        here.source.remove(info.name)
    here.save("step_9")
    for _ in range(2):
        here.once(settings)
    assert [alert.title for alert in here.told if alert.problem == "recovered"] == [
        f"[{RUN}] has no junk any more"
    ]


def _sizes(life: Lifecycle) -> Any:
    life.save("step_1", without=(".metadata",))
    return life.source.objects()


def test_an_alert_of_the_run_reaches_sinks_and_is_tried_again(here: Lifecycle) -> None:
    for number in range(4):
        saved(here, f"step_{number}", 10 * HOUR - number * HOUR)
    with webhook() as sink:
        settings = here.settings('resend_after = "0s"', alerts=[sink.url])
        sink.broken = True
        report = here.once(settings)
        [told] = report.runs[0].alerts
        assert (told.problem, told.ok) == ("stalled", False)
        [alert] = run_status(settings).runs[0].alerts
        assert (alert.state, alert.deliveries, alert.over) == ("failed", 1, False)
        [page] = gather_runs(settings).runs
        assert verdict_of(page).word == "Stalled"
        assert [(told.step, told.problem, told.state) for told in page.alerts] == [("", "stalled", "failed")]
        assert '<th scope="row">the whole run</th><td>stalled</td>' in render_runs(
            gather_runs(settings), lambda _: None
        )
        sink.broken = False
        assert here.once(settings).runs[0].redelivered == 1
        here.once(settings)
        assert [note["title"] for note in sink.received] == [
            f"[{RUN}] saves no more: nothing for 7 h after step_3"
        ]


def test_a_stall_that_is_over_is_no_stall_where_the_news_of_it_did_not_arrive(
    here: Lifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.sinks._TRIES", 1)
    for number in range(4):
        saved(here, f"step_{number}", 10 * HOUR - number * HOUR)
    with webhook() as sink:
        settings = here.settings(alerts=[sink.url])
        sink.broken = True
        here.once(settings)
        saved(here, "step_4", 60)
        here.once(settings)
        status = run_status(settings)
        told = [(alert.problem, alert.state, alert.over) for alert in status.runs[0].alerts]
        assert told == [("stalled", "failed", True), ("recovered", "failed", True)]
        [page] = gather_runs(settings).runs
        assert verdict_of(page).word == "Healthy"
        assert [told.problem for told in page.alerts] == ["recovered", "stalled"]


def test_keys_that_changed_on_purpose_are_accepted_with_one_command(here: Lifecycle) -> None:
    settings = here.settings(expectation="previous")
    here.save("step_1")
    for number in (2, 3, 4):
        here.save(f"step_{number}", OTHER_KEYS)
    assert outcomes(here.once(settings)) == {
        "step_1": "published",
        **{f"step_{number}": "key-mismatch" for number in (2, 3, 4)},
    }
    command = f"ckpt run {here.source.url}/step_2 --accept-keys --config {settings.file}"
    assert command in here.told[0].advice
    assert outcomes(here.once(settings)) == {}

    report = process_step(
        Workshop.of(settings, RUN, emit=here.told.append), "step_2", force=True, accept_keys=True
    )
    assert report.outcome == "published"
    # The others are judged again by themselves, as is what comes later.
    here.save("step_5", OTHER_KEYS)
    here.save("step_6")
    assert outcomes(here.once(settings)) == {
        "step_3": "published",
        "step_4": "published",
        "step_5": "published",
        "step_6": "key-mismatch",
    }
    assert outcomes(here.once(settings)) == {}
    told = [(alert.step, alert.problem) for alert in here.told]
    assert told[3:] == [
        ("step_2", "recovered"),
        ("step_3", "recovered"),
        ("step_4", "recovered"),
        ("step_6", "key-mismatch"),
    ]


def test_accepting_survives_a_step_that_fails_later(here: Lifecycle) -> None:
    wrong = here.settings(expectation="previous", tables="[[runs.exports]]\nmemory_budget = 1\n")
    here.save("step_1")
    here.once(here.settings(expectation="previous"))
    here.save("step_2", OTHER_KEYS)
    here.once(wrong)
    report = process_step(Workshop.of(wrong, RUN), "step_2", force=True, accept_keys=True)
    assert (report.outcome, report.problem) == ("retry", "export")
    assert outcomes(here.once(here.settings(expectation="previous"))) == {"step_2": "published"}


@pytest.mark.parametrize("expectation", ["none", "contract"])
def test_keys_are_accepted_only_where_they_are_expected_of_the_step_before(
    here: Lifecycle, expectation: str
) -> None:
    here.save("step_1")
    if expectation == "contract":
        expectation = f"{here.source.url}/contract.json"
        here.source.replace("contract.json", b"{}")
    settings = here.settings(expectation=expectation)
    with pytest.raises(UsageError, match="ckpt contract"):
        process_step(Workshop.of(settings, RUN), "step_1", accept_keys=True)


def test_late_older_steps_are_left_alone_where_the_settings_say_so(here: Lifecycle) -> None:
    settings = here.settings(late_steps="ignore")
    saved(here, "step_10", 3000)
    saved(here, "step_20", 2000)
    here.once(settings)
    saved(here, "step_15", 100)
    report = here.once(settings)
    assert (outcomes(report), report.runs[0].late) == ({}, ["step_15"])
    assert run_status(settings).runs[0].steps[1].state == "late"
    assert watch_once(settings).runs[0].late == ["step_15"]
    # It was only slow if it was committed first, and newer steps are not late.
    saved(here, "step_12", 2500)
    saved(here, "step_30", 50)
    assert outcomes(here.once(settings)) == {"step_12": "published", "step_30": "published"}
    # By hand it can be had, and the other policy takes it.
    assert process_step(Workshop.of(settings, RUN), "step_15").outcome == "published"
    saved(here, "step_16", 100)
    assert outcomes(here.once(here.settings())) == {"step_16": "published"}


def test_storage_that_stays_out_of_reach_is_told_once_and_its_return_once(here: Lifecycle) -> None:
    saved(here, "step_1", 60)
    other = f'[[runs]]\nname = "other"\nsource = "{here.url}/train"\npublish = "{here.url}/elsewhere"\n'
    other += 'grace_period = "0s"\nlayouts = []\n'
    settings = here.settings('unreachable_after = "0s"\n' + other)
    away = Path(here.url) / "away"
    for outage in (1, 2):
        (Path(here.url) / "train").rename(away)
        source = Path(here.url) / "train"
        for _ in range(3):
            assert here.once(settings).exit_code == 3
        told = [alert for alert in here.told if alert.run == RUN]
        assert [alert.problem for alert in told] == [
            *["unreachable", "recovered"] * (outage - 1),
            "unreachable",
        ]
        assert told[-1].title == f"[{RUN}] its storage cannot be reached"
        assert str(source) in told[-1].what
        assert told[-1].command == f"ckpt watch --once --config {settings.file}"
        # The quick look that begins a pass finds nothing to tell either.
        assert watch_once(settings).exit_code == 3
        away.rename(source)
        for _ in range(2):
            assert here.once(settings).exit_code == 0
        assert here.told[-1].problem == "recovered"
        assert watch_once(settings).runs[0].unchanged == 1
    assert [alert.title for alert in here.told if alert.run == RUN][1] == (
        f"[{RUN}] its storage can be reached again"
    )


def test_other_runs_are_seen_to_in_a_pass_that_tells_of_one_out_of_reach(here: Lifecycle) -> None:
    saved(here, "step_1", 60)
    lost = f'[[runs]]\nname = "lost"\nsource = "{here.url}/nowhere"\npublish = "{here.url}/published"\n'
    report = here.once(here.settings('unreachable_after = "0s"\n' + lost))
    assert [(alert.run, alert.problem) for alert in here.told] == [("lost", "unreachable")]
    assert outcomes(report) == {"step_1": "published"}


def test_storage_that_fails_for_a_moment_is_told_to_nobody(
    here: Lifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(here, "step_1", 60)
    settings = here.settings()
    source, away, begun = Path(here.source.url), Path(here.url) / "away", time.time()
    assert settings.unreachable_after == 300

    def minutes_later(minutes: float) -> None:
        monkeypatch.setitem(Ledger.__init__.__kwdefaults__, "clock", lambda: begun + 60 * minutes)

    for minutes in (0.0, 6.0):
        # An outage that is over does not count for the next one.
        minutes_later(minutes)
        source.rename(away)
        assert watch_once(settings).exit_code == 3
        minutes_later(minutes + 4)
        assert watch_once(settings).exit_code == 3
        away.rename(source)
        assert here.once(settings).exit_code == 0
    assert here.told == []
    minutes_later(12)
    source.rename(away)
    here.once(settings)
    assert here.told == []
    minutes_later(17.1)
    here.once(settings)
    [alert] = here.told
    assert (alert.problem, alert.since) == ("unreachable", timestamp(begun + 12 * 60))


@pytest.mark.parametrize("lost", ["objects", "create"])
def test_a_ledger_that_stays_out_of_reach_is_told_once_and_its_return_once(
    lost: str, here: Lifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it to list or to write it: what no ledger can note, this machine remembers over all passes."""
    saved(here, "step_1", 60)
    monkeypatch.setenv("XDG_STATE_HOME", str(here.directory / "state"))
    settings = here.settings('unreachable_after = "0s"\n')
    here.once(settings)
    saved(here, "step_2", 50)
    root = settings.runs[0].publish
    allowed = getattr(LocalStore, lost)

    def refused(store: LocalStore, *arguments: Any) -> Any:
        if store.url.startswith(root):
            raise ForbiddenError(f"no permission for {store.url}", store.url)
        return allowed(store, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, lost, refused)
        for _ in range(3):
            assert here.once(settings).exit_code == 3
        [alert] = here.told
        assert (alert.problem, alert.title) == ("unreachable", f"[{RUN}] its storage cannot be reached")
        assert root in alert.what
        assert alert.command == f"ckpt watch --once --config {settings.file}"
    for _ in range(2):
        assert here.once(settings).exit_code == 0
    assert [told.problem for told in here.told] == ["unreachable", "recovered"]
    assert watch_once(settings).exit_code == 0
    assert list((here.directory / "state" / "ckpt-lifecycle").iterdir()) == []


def test_a_ledger_that_failed_long_ago_begins_another_outage(
    here: Lifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(here.directory / "state"))
    run = here.settings().runs[0]
    assert Unnoted(run, clock=lambda: 1e9).since() == 1e9
    assert Unnoted(run, clock=lambda: 1e9 + 60).since() == 1e9
    assert Unnoted(run).claim()
    assert not Unnoted(run).claim()
    assert Unnoted(run, clock=lambda: 1e9 + 86400).since() == 1e9 + 86400
    assert not Unnoted(run).told


def test_a_user_without_a_home_remembers_no_outage(here: Lifecycle, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number of no user."""
    run = here.settings().runs[0]
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 987_654)
    unnoted = Unnoted(run)
    assert unnoted.since() is None
    assert not unnoted.told
    assert not unnoted.claim()
    assert not unnoted.over()
