"""Saves whose ranks are killed at a random moment, and what is left of them."""

import os
import random
import signal
import threading
from enum import Enum
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint

import dcp
from dcp.save import BucketWriter
from dcp.storage import open_store
from tests.dcp.load.expectations import same_bits
from tests.dcp.save.saving import load, names, save
from tests.support.ranks import RankError, run_ranks

_TENSORS = 16
_ELEMENTS = 300_000


class Outcome(Enum):
    """What is at the place after the kill."""

    BEFORE = "still the step that was there before"
    WRITING = "no step that looks committed"
    AFTER = "the new step"


def kill_a_save(place: str, files: int, moments: random.Random, *, replaced: bool) -> Outcome:
    """Save on two ranks, one of which is killed, and prove that what is left is whole or nothing.

    Args:
        place: where there is nothing yet.
        files: most files a rank writes.
        moments: says which rank is killed, and when.
        replaced: there shall be a committed step before.
    """
    if replaced:
        save({"w0": torch.zeros(9)}, BucketWriter(place))
    survived = True
    try:
        # Most of a save is over in half a second; where the machine is busy it is not.
        delay = moments.uniform(0, moments.choice([0.4, 2.0]))
        run_ranks(_save_and_die, 2, place, files, moments.randrange(2), delay)
    except RankError:
        survived = False
    store = open_store(place)
    committed = store.exists(".metadata")
    assert committed or not survived
    outcome = Outcome.WRITING
    if committed:
        report = dcp.validate(place, scrub=True)
        assert report.ok, (place, report.findings)
        is_new = "w1" in dcp.read_index(place).entries
        outcome = Outcome.AFTER if is_new else Outcome.BEFORE
        if is_new:
            _assert_loads(place, 1.0)
        else:
            assert replaced
            assert load({"w0": torch.ones(9)}, place)["w0"].eq(0).all()
    # The job is started again, and saves the step that it was about to save.
    save(_state(2.0), BucketWriter(place, overwrite=True, files_per_rank=files))
    _assert_loads(place, 2.0)
    # Nothing of the one that was killed is left.
    left = names(place)
    assert left == [".metadata", *(f"__0_{number}.distcp" for number in range(len(left) - 1))]
    return outcome


def _assert_loads(place: str, factor: float) -> None:
    wanted = _state(factor)
    loaded = load({key: torch.zeros_like(value) for key, value in wanted.items()}, place)
    assert all(same_bits(loaded[key], value) for key, value in wanted.items())


def _state(factor: float) -> dict[str, Any]:
    return {f"w{number}": torch.full((_ELEMENTS,), number * factor) for number in range(_TENSORS)}


def _save_and_die(place: str, files: int, victim: int, delay: float) -> None:
    import torch.distributed as dist

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dcp.save.files.LEAST", 1 << 21)
        writer = BucketWriter(place, overwrite=True, files_per_rank=files)
        dist.barrier()
        if dist.get_rank() == victim:
            killer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
            # A rank that is done before need not wait to be killed.
            killer.daemon = True
            killer.start()
        torch_checkpoint.save(_state(1.0), storage_writer=writer)
