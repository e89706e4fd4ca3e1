"""Ranks killed at random moments of a save: whatever is left, a step that looks committed is whole.

python -m pytest -s tests/soak/test_killed_writers.py
"""

import random
from pathlib import Path

import pytest

from tests.dcp.save.killing import Outcome, kill_a_save

KILLS = 30


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("files", [1, 4], ids=["one-file-a-rank", "many-files-a-rank"])
@pytest.mark.parametrize("kind", ["local", "gs", "s3"])
def test_no_step_that_looks_committed_is_damaged(
    kind: str, files: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    seed = random.randrange(1 << 32)
    moments = random.Random(seed)
    root = str(tmp_path) if kind == "local" else request.getfixturevalue(f"{kind}_bucket")
    outcomes = [
        # Every other one is over a committed step of other content.
        kill_a_save(f"{root}/step_{number}", files, moments, replaced=bool(number % 2))
        for number in range(KILLS)
    ]
    print(f"{kind}, {files} files a rank, seed {seed}: {KILLS} kills")
    for outcome in Outcome:
        print(f"  {outcome.value}: {outcomes.count(outcome)}")
    assert Outcome.WRITING in outcomes
