"""kill -9 at random moments, and workers that race: every good step is published once and whole."""

import random
from pathlib import Path

import pytest

from tests.support.faults import Victim, assert_settled, kill_one, race
from tests.support.harness import PrefectApi
from tests.support.lifecycle import Lifecycle
from tests.support.web import webhook

STEPS = 5
KILLS = 4


def prepared(tmp_path: Path) -> Lifecycle:
    life = Lifecycle(str(tmp_path / "place"), tmp_path / "settings")
    for number in range(STEPS):
        life.save(f"step_{number}", "torch_fsdp2_file_per_tensor")
    life.save("step_9", without=(".metadata",))
    return life


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "export"])
def test_killed_workers_lose_and_double_nothing(tmp_path: Path, victim: Victim) -> None:
    life = prepared(tmp_path)
    chance = random.Random(6)
    with webhook() as sink:
        settings = life.settings(top='resend_after = "0s"', alerts=[sink.url])
        for _ in range(KILLS):
            kill_one(life, settings, victim, chance)
        assert_settled(life, settings, {f"step_{number}" for number in range(STEPS)}, bad=1)
        # A worker may have died between sending and recording that it sent.
        assert len(sink.received) in (1, 2)


@pytest.mark.slow
def test_killed_watchers_lose_and_double_nothing(tmp_path: Path, prefect_api: PrefectApi) -> None:
    life = prepared(tmp_path)
    chance = random.Random(7)
    with webhook() as sink:
        settings = life.settings(top='resend_after = "0s"', alerts=[sink.url])
        for number in range(3):
            extra = {**prefect_api.env, "PREFECT_HOME": str(tmp_path / f"home-{number}")}
            kill_one(life, settings, "watcher", chance, longest=6.0, extra=extra)
        assert_settled(life, settings, {f"step_{number}" for number in range(STEPS)}, bad=1)
        assert len(sink.received) in (1, 2)


def test_two_workers_that_race_publish_and_tell_once(tmp_path: Path) -> None:
    life = Lifecycle(str(tmp_path / "place"), tmp_path / "settings")
    race(life, life.settings(), rounds=10)
