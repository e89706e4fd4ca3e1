"""Watchers, workers and exports killed at 50 random moments; two workers that race 100 rounds.

[KILLS=50 ROUNDS=100] python -m pytest tests/soak/test_killed_pipeline.py -s
"""

import os
import random
from pathlib import Path

import pytest

from tests.support.faults import Victim, assert_settled, kill_one, manifests, race, undisturbed
from tests.support.harness import PrefectApi
from tests.support.lifecycle import Lifecycle
from tests.support.web import webhook

KILLS = int(os.environ.get("KILLS", "50"))
ROUNDS = int(os.environ.get("ROUNDS", "100"))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victim", ["worker", "export", "watcher"])
def test_nothing_is_lost_or_doubled(tmp_path: Path, victim: Victim, request: pytest.FixtureRequest) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    extra: dict[str, str] = {}
    if victim == "watcher":
        api: PrefectApi = request.getfixturevalue("prefect_api")
        extra = {**api.env, "PREFECT_HOME": str(tmp_path / "home")}
    life = Lifecycle(str(tmp_path / "place"), tmp_path / "settings")
    good: set[str] = set()
    with webhook() as sink:
        settings = life.settings(top='resend_after = "0s"', alerts=[sink.url])
        good.add("step_0")
        life.save("step_0", "torch_fsdp2_file_per_tensor")
        # However busy the machine is, death comes at every point of the work, and some of it gets done.
        longest = 2 * undisturbed(settings, victim, extra=extra)
        print(f"{longest:.1f} s at most until death")
        for number in range(KILLS):
            # There is always something to do when death comes.
            while len(good) < len(manifests(life)) + 3:
                good.add(f"step_{len(good) * 2}")
                life.save(f"step_{(len(good) - 1) * 2}", "torch_fsdp2_file_per_tensor")
            if number % 5 == 0:
                life.save(f"step_{number * 2 + 1}", without=(".metadata",))
            kill_one(life, settings, victim, chance, longest=longest, extra=extra)
        bad = KILLS // 5
        assert_settled(life, settings, good, bad)
        told = [note["title"] for note in sink.received]
        print(f"{len(good)} good steps, {bad} bad ones, {len(told)} alerts, {len(set(told))} different")
        assert len(set(told)) == bad
        assert len(good) > KILLS / 5, "nearly every death came before any work was done"
        # A worker that died between sending and recording it leaves the alert to be sent again, once.
        assert all(told.count(title) <= 2 for title in told)


@pytest.mark.timeout(3600)
def test_two_workers_race(tmp_path: Path) -> None:
    life = Lifecycle(str(tmp_path / "place"), tmp_path / "settings")
    left = race(life, life.settings(), ROUNDS)
    print(f"{ROUNDS} rounds, {left} times a step was left to the other")
    assert left > 0
