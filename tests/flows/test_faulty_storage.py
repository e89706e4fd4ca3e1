"""Storage that fails in every way a pass can meet: nothing is concluded, and the next pass recovers."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dcp.errors import ForbiddenError, OutOfSpaceError, UnreachableError
from dcp.storage.faults import translate
from dcp.storage.remote import RemoteStore
from flows.passes import watch_once
from tasks import leases
from tasks.publish import verify
from tests.support.lifecycle import Lifecycle, anywhere, outcomes

VERBS = ("objects", "read_range", "create", "replace", "writer", "info")


@pytest.fixture
def life(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lifecycle:
    # Which operation fails must not depend on how slow the machine is: nothing runs beside the pass.
    monkeypatch.setattr(leases, "_LEAST_PAUSE", 3600.0)
    life = Lifecycle(anywhere("memory", request, tmp_path), tmp_path / "settings")
    life.save("step_1")
    life.save("step_2", without=(".metadata",))
    return life


@contextmanager
def failing(fault: Exception, when: int) -> Iterator[list[int]]:
    """The operation number ``when`` (from 0) of a pass fails; gives how many there were."""
    count = [0]

    def wrapped(verb: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any) -> Any:
            count[0] += 1
            if count[0] - 1 == when:
                raise fault
            return verb(*args)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for verb in VERBS:
            patch.setattr(RemoteStore, verb, wrapped(getattr(RemoteStore, verb)))
        yield count


FAULTS = {
    "503": UnreachableError("cannot reach it (HTTP 503)"),
    "reset": translate(ConnectionResetError(errno.ECONNRESET, "connection reset"), "memory://x"),
    "permission": ForbiddenError("no permission"),
    "full": OutOfSpaceError("no space left"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_operation_is_the_environments_and_passes(life: Lifecycle, fault: str) -> None:
    """The fault strikes one operation after another; between two of them nothing is repaired by hand."""
    settings = life.settings(max_attempts=100, top='lease_expiry = "0s"')
    struck = 0
    for when in range(0, 400, 5):
        with failing(FAULTS[fault], when) as count:
            report = life.once(settings)
        if count[0] <= when:
            break
        struck += 1
        # Nobody is told that a good step is bad, and what is published is whole.
        assert {alert.problem for alert in life.told} <= {"incomplete"}
        assert report.exit_code in (0, 1, 3)
    assert struck > 4
    for _ in range(2):
        last = life.once(settings)
    assert (last.runs[0].unchanged, last.exit_code) == (2, 0)
    assert [alert.problem for alert in life.told] == ["incomplete"]
    [name] = life.manifests()
    assert verify(f"{life.published.url}/{name}").ok


@pytest.mark.parametrize("fault", FAULTS)
def test_a_source_that_always_fails_is_exit_3_and_no_verdict(
    life: Lifecycle, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    settings = life.settings()
    objects = RemoteStore.objects

    def fails(store: RemoteStore) -> Any:
        if "/train" in store.url:
            raise FAULTS[fault]
        return objects(store)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteStore, "objects", fails)
        for _ in range(3):
            report = watch_once(settings)
            assert (report.exit_code, report.steps) == (3, [])
    assert life.told == []
    assert outcomes(life.once(settings)) == {"step_1": "published", "step_2": "incomplete"}


def test_an_answer_that_ends_early_is_asked_for_again(
    life: Lifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data is whole and only one answer was not: it must not be held against the step for good."""
    settings = life.settings(top='lease_expiry = "0s"')
    read = RemoteStore._cat
    short = [0]

    def cut(store: RemoteStore, path: str, start: int, end: int) -> bytes:
        data = read(store, path, start, end)
        if ".distcp" in path and not short[0]:
            short[0] += 1
            return data[: len(data) // 2]
        return data

    with monkeypatch.context() as patch:
        patch.setattr(RemoteStore, "_cat", cut)
        report = life.once(settings)
    assert short == [1]
    assert outcomes(report)["step_1"] == "published"


def test_a_listing_that_lags_behind_publishes_nothing_wrong(
    life: Lifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = life.settings()
    life.once(settings)
    stale = life.source.child("step_1").objects()
    life.save("step_1")
    objects = RemoteStore.objects

    def lagging(store: RemoteStore) -> Any:
        return stale if store.url.endswith("/step_1") and "/train" in store.url else objects(store)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteStore, "objects", lagging)
        life.once(settings)
    for name in life.manifests():
        assert verify(f"{life.published.url}/{name}").ok
    assert outcomes(life.once(settings)) == {"step_1": "published"}
    assert outcomes(life.once(settings)) == {}
    assert {alert.problem for alert in life.told} == {"incomplete"}


@pytest.mark.parametrize("skew", [-600.0, 600.0])
def test_clocks_that_differ_by_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skew: float) -> None:
    """A worker whose clock is off neither judges a step that is being written nor loses one that is whole."""
    here = Lifecycle(str(tmp_path / "place"), tmp_path / "settings")
    here.save("step_1")
    here.save("step_2", without=(".metadata",))
    settings = here.settings(grace_period="1h")
    real = time.time
    with monkeypatch.context() as patch:
        patch.setattr("time.time", lambda: real() + skew)
        report = here.once(settings)
        assert (outcomes(report), report.runs[0].writing) == ({"step_1": "published"}, ["step_2"])
    assert outcomes(here.once(settings)) == {}
    assert here.told == []


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Lifecycle(str(tmp_path / "place"), tmp_path / "settings")
    here.save("step_1")
    settings = here.settings()
    fsync = os.fsync

    def full(handle: int) -> None:
        if "checkpoint.pt" in str(Path(f"/proc/self/fd/{handle}").readlink()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        report = here.once(settings)
    assert (report.exit_code, report.steps[0].outcome) == (3, "retry")
    assert "no space left" in report.steps[0].message
    assert not [path for path in Path(here.published.url).rglob("*") if path.name.startswith("checkpoint.pt")]
    assert outcomes(here.once(settings)) == {"step_1": "published"}
