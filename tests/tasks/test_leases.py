"""A step has one holder at a time, a dead one is replaced by exactly one other, and nothing is left."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dcp.errors import NotFoundError, UnreachableError
from dcp.storage import Store, open_store
from tasks.leases import PREFIX, Lease, LeaseLostError, Leases, standings
from tests.support.lifecycle import anywhere
from tests.support.waiting import runs, until


@pytest.fixture(params=["local", "memory", "gs", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(anywhere(request.param, request, tmp_path))


@pytest.fixture
def disk(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "place"))


def taken(leases: Leases, step: str = "step_1") -> Lease:
    lease = leases.acquire(step)
    assert lease is not None
    return lease


def left(store: Store) -> set[str]:
    try:
        return {info.name for info in store.objects()} - {f"{PREFIX}probe", "other"}
    except NotFoundError:
        return set()


def test_one_holder_at_a_time_and_nothing_left_behind(store: Store) -> None:
    leases = Leases(store)
    with taken(leases) as lease:
        assert leases.acquire("step_1") is None
        assert leases.acquire("step_10") is not None
        lease.require()
        holder = leases.holder(leases.all()["step_1"])
        assert holder is not None
        assert (holder.pid, lease.number) == (os.getpid(), 1)
    assert {name for name in left(store) if "step_1." in name} == set()
    assert leases.standing("step_1") is None
    assert taken(leases).number == 1


def test_who_gives_no_sign_of_life_is_replaced_and_stops(store: Store) -> None:
    patient, hasty = Leases(store, 3600), Leases(store, 0)
    first = taken(patient)
    assert patient.acquire("step_1") is None
    second = taken(hasty)
    assert second.number == 2
    with pytest.raises(LeaseLostError, match="step_1"):
        first.require()
    # Whoever lost it gives back nothing that is another's now.
    first.release()
    second.require()
    assert patient.acquire("step_1") is None
    second.release()
    assert left(store) == set()
    # Also where everything has been given back and begun anew meanwhile.
    third = taken(patient)
    assert third.number == first.number
    with pytest.raises(LeaseLostError):
        first.require()
    first.release()
    third.require()


def test_signs_of_life_keep_it(disk: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.leases._LEAST_PAUSE", 0.02)
    patient, hasty = Leases(disk, 3600), Leases(disk, 0.5)

    def sign_of_life() -> float:
        standing = patient.standing("step_1")
        assert standing is not None
        assert standing.alive_at is not None
        return standing.alive_at

    with taken(hasty) as lease:
        first = sign_of_life()
        # Who looks at that moment would have given it up without the signs in between.
        until(lambda: sign_of_life() > first + hasty.expiry)
        assert patient.acquire("step_1") is None
        lease.require()
    with taken(hasty) as silent:
        silent.stop()
        until(lambda: hasty.acquire("step_1") is not None)


def test_of_many_that_take_over_one_succeeds(store: Store) -> None:
    for number in range(3):
        dead = taken(Leases(store, 3600), f"step_{number}")
        got: list[Lease] = []
        gate = threading.Barrier(6)

        def take(step: str = dead.step, gate: threading.Barrier = gate, got: list[Lease] = got) -> None:
            mine = Leases(store, 0)
            seen = mine.standing(step)
            gate.wait()
            assert seen is not None
            # All of them have seen the same dead holder.
            mine.standing = lambda _, answers=[seen], real=mine.standing: (  # type: ignore[method-assign]
                answers.pop() if answers else real(step)
            )
            lease = mine.acquire(step)
            if lease is not None:
                got.append(lease)

        threads = [threading.Thread(target=take) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 1


HOLDER = """
import sys
from dcp.storage import open_store
from tasks.leases import Leases
lease = Leases(open_store(sys.argv[1])).acquire("step_1")
lease.__enter__()
print("holding", flush=True)
sys.stdin.read()
"""


def test_a_killed_process_of_this_machine_is_replaced_at_once(disk: Store) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, disk.url],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"holding\n"
    leases = Leases(disk)
    assert leases.acquire("step_1") is None
    holder.kill()
    until(lambda: not runs(holder.pid))
    # Not waited for yet: what is left of it must not pass for alive.
    assert leases.acquire("step_1") is not None
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()


@pytest.mark.parametrize("ahead", [-900.0, 900.0])
def test_no_two_machines_clocks_are_compared(
    disk: Store, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    leases = Leases(disk, 60)
    real = time.time
    with monkeypatch.context() as patch:
        patch.setattr("tasks.leases.time.time", lambda: real() + ahead)
        patch.setattr("dcp.processes.machine", lambda: "another machine")
        taken(leases).renew()
    assert leases.acquire("step_1") is None


@pytest.mark.parametrize(("ago", "free"), [(60.0, False), (500.0, False), (1000.0, True)])
def test_where_the_store_tells_no_times_skew_is_allowed_for(
    disk: Store, monkeypatch: pytest.MonkeyPatch, ago: float, free: bool
) -> None:
    leases = Leases(disk, 60)
    real = time.time
    with monkeypatch.context() as patch:
        patch.setattr("tasks.leases.time.time", lambda: real() - ago)
        patch.setattr("dcp.processes.machine", lambda: "another machine")
        assert taken(leases).renew()
    monkeypatch.setattr("tasks.leases.Standing.alive_at", None)
    assert (leases.acquire("step_1") is not None) is free


def test_a_claim_that_says_nothing_still_expires(disk: Store) -> None:
    disk.create(f"{PREFIX}step_1.000001.claim", b"\x00garbage")
    assert Leases(disk, 60).acquire("step_1") is None
    assert taken(Leases(disk, 0)).number == 2


def test_other_objects_are_no_leases(disk: Store) -> None:
    for name in ("probe", "step_1.1.claim", "step_1.000001.beat", "x/step_1.000001.claim", "step_1.000001"):
        disk.create(f"{PREFIX}{name}", b"x")
    assert Leases(disk).all() == standings(disk.objects()) == {}
    lease = taken(Leases(disk))
    lease.release()
    assert f"{PREFIX}step_1.000001.beat" not in left(disk)


def test_what_a_dead_worker_left_is_swept(store: Store) -> None:
    lease = taken(Leases(store, 3600))
    lease.renew()
    assert not Leases(store, 3600).sweep(Leases(store).all()["step_1"])
    assert Leases(store, 0).sweep(Leases(store).all()["step_1"])
    assert left(store) == set()


def test_a_store_that_fails_is_not_a_lost_lease(disk: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise UnreachableError("cannot reach it")

    with taken(Leases(disk)) as lease, monkeypatch.context() as patch:
        patch.setattr(type(disk), "objects", fail)
        with pytest.raises(UnreachableError):
            lease.require()
    # Giving back must not hide what happened inside.
    monkeypatch.setattr(type(disk), "remove", fail)
    with pytest.raises(KeyError), taken(Leases(disk), "step_2"):
        raise KeyError
