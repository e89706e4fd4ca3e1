"""Ranks killed at random moments of a save: whatever is left, a step that looks committed is whole.

python -m pytest tests/soak/test_killed_writers.py
"""

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint

import dcp
from dcp.save import BucketWriter
from dcp.storage import open_store
from tests.dcp.save.saving import save
from tests.support.ranks import RankError, run_ranks

KILLS = 30


def _save_and_die(place: str, victim: int, delay: float) -> None:
    import torch.distributed as dist

    state: dict[str, Any] = {f"w{n}": torch.full((300_000,), float(n)) for n in range(16)}
    dist.barrier()
    if dist.get_rank() == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    torch_checkpoint.save(state, storage_writer=BucketWriter(place, overwrite=True))


@pytest.mark.parametrize("kind", ["local", "gs"])
def test_no_step_that_looks_committed_is_damaged(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    root = str(tmp_path) if kind == "local" else request.getfixturevalue("gs_bucket")
    states: list[str] = []
    for number in range(KILLS):
        place = f"{root}/step_{number}"
        if number % 2:  # over a committed step of other content
            save({"w0": torch.zeros(9)}, BucketWriter(place))
        survived = True
        try:
            run_ranks(_save_and_die, 2, place, moments.randrange(2), moments.uniform(0, 0.4))
        except RankError:
            survived = False
        committed = open_store(place).exists(".metadata")
        assert committed or not survived
        if committed:
            report = dcp.validate(place, scrub=True)
            assert report.ok, (place, report.findings)
        states.append("committed" if committed else "not committed")
    print({state: states.count(state) for state in sorted(set(states))})
    assert "not committed" in states
