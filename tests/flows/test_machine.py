"""Any history of saves, passes, crashes and interleaved workers ends with every good step published once.

A crash, a second worker or another save strikes at the n-th operation of a pass, before it or after it.
Whatever happened, quiet passes afterwards must settle everything, and a settled pass writes nothing.
"""

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dcp.storage import open_store
from dcp.storage.remote import RemoteStore
from flows.lifecycle import _Process
from flows.settings import load_settings
from flows.workshop import StepReport
from tasks import leases
from tasks.leases import PREFIX, Lease
from tasks.publish import current_alias, verify
from tests.support.lifecycle import SMALL, CrashError, Lifecycle

MOST = 60
"""Operations of a pass among which one is struck; a step that is published takes about forty."""

IMPATIENT = 'resend_after = "0s"\nlease_expiry = "0s"'
"""Whoever gave no sign of life until now is dead."""
PATIENT = 'resend_after = "1h"\nlease_expiry = "1h"'

WRITES = ("create", "replace", "writer")
READS = ("objects", "read_range")


@contextmanager
def struck(
    when: int, after: bool, strike: Callable[[], None], verbs: tuple[str, ...] = WRITES
) -> Iterator[None]:
    """Call `strike` at operation number `when` (from 0) among `verbs`, before or after its effect."""
    count = 0
    busy = False

    def hit() -> None:
        nonlocal busy
        busy = True
        strike()
        busy = False

    @contextmanager
    def counted() -> Iterator[None]:
        nonlocal count
        mine = not busy and count == when
        count += not busy
        if mine and not after:
            hit()
        yield
        if mine and after:
            hit()

    def wrapped(verb: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any) -> Any:
            with counted():
                return verb(*args)

        @contextmanager
        def stream(*args: Any) -> Iterator[Any]:
            with counted(), verb(*args) as sink:
                yield sink

        return stream if verb.__name__ == "writer" else operation

    with pytest.MonkeyPatch.context() as patch:
        for verb in verbs:
            patch.setattr(RemoteStore, verb, wrapped(getattr(RemoteStore, verb)))
        yield


def crash() -> None:
    raise CrashError


@pytest.fixture(autouse=True)
def _the_dead_give_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that dies leaves its lease behind, which the way out of a context would not."""
    leave = Lease.__exit__

    def leave_or_die(lease: Lease, kind: Any, error: Any, trace: Any) -> None:
        if kind is CrashError:
            lease.stop()
        else:
            leave(lease, kind, error, trace)

    monkeypatch.setattr(Lease, "__exit__", leave_or_die)


@pytest.fixture(autouse=True)
def _no_sign_of_life_is_struck(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Which operation is struck must not depend on how slow the machine is: nothing runs beside it."""
    monkeypatch.setattr(leases, "_LEAST_PAUSE", 3600.0)
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("lease-")]


@pytest.fixture(autouse=True)
def _no_step_is_worked_on_twice_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every worker waits long enough for the others' signs of life."""
    work = _Process._work
    at_work: list[str] = []

    def watched(process: _Process, lease: Lease) -> StepReport:
        step = process.url
        if lease.leases.expiry:
            assert step not in at_work
        at_work.append(step)
        try:
            return work(process, lease)
        finally:
            at_work.remove(step)

    monkeypatch.setattr(_Process, "_work", watched)


STEPS = st.integers(1, 4)
STRIKES = st.integers(0, MOST)
VERBS = st.sampled_from([WRITES, WRITES + READS])
KINDS = st.sampled_from(["good", "good", "incomplete", "torn"])


class Machine(RuleBasedStateMachine):
    """What was done to steps, and what must be true of any of it.

    `saved` holds the kind of each step's present bytes, `crashes` how often an alert may have been repeated,
    `replaced` the manifests there were when the bytes of a listing were saved over.
    """

    directory: Path

    @initialize()
    def begin(self) -> None:
        bucket = f"memory://bucket-{uuid.uuid4().hex}"
        open_store(bucket).replace("other", b"")
        self.life = Lifecycle(f"{bucket}/place", self.directory / uuid.uuid4().hex)
        self.settings = self.life.settings(top=IMPATIENT)
        self.saved: dict[int, str] = {}
        self.versions = 0
        self.replaced: dict[str, list[str]] = {}
        self.crashes = 0
        self.save(1, "good")

    @rule(number=STEPS, kind=KINDS)
    def save(self, number: int, kind: str) -> None:
        """Save over a step, or for the first time."""
        source = self.life.source
        step = f"step_{number}"
        if number in self.saved:
            for info in source.child(step).objects():
                source.remove(f"{step}/{info.name}")
        self.versions += 1
        # A file of its own makes these bytes differ from all before.
        source.replace(f"{step}/run.log", str(self.versions).encode())
        self.life.save(step, SMALL, without=(".metadata",) if kind == "incomplete" else ())
        if kind == "torn":
            self.life.cut(step)
        self.saved[number] = kind

    @rule()
    def quiet_pass(self) -> None:
        self.life.once(self.settings)

    @rule(when=STRIKES, after=st.booleans(), verbs=VERBS)
    def crashed_pass(self, when: int, after: bool, verbs: tuple[str, ...]) -> None:
        try:
            with struck(when, after, crash, verbs):
                self.life.once(self.settings)
        except CrashError:
            self.crashes += 1

    @rule(when=STRIKES, after=st.booleans(), verbs=VERBS)
    def interleaved_pass(self, when: int, after: bool, verbs: tuple[str, ...]) -> None:
        """A second worker makes a whole pass while the first stands still at one of its operations."""
        # The first is alive, only slow: its alerts are not to be taken over.
        patient = self.life.settings(top=PATIENT)
        with struck(when, after, lambda: self._pass(patient), verbs):
            self.life.once(patient)
        self.settings = self.life.settings(top=IMPATIENT)

    @rule(when=STRIKES, number=STEPS, kind=KINDS, verbs=VERBS)
    def saved_over_during_a_pass(self, when: int, number: int, kind: str, verbs: tuple[str, ...]) -> None:
        # Between the last look at the source and the manifest there is a moment that no store can close; just
        # after a write, one is never in it.
        judged = verbs == WRITES

        def save() -> None:
            if judged and number in self.saved:
                self.replaced[self.listing(f"step_{number}")] = self.manifests()
            self.save(number, kind)

        with struck(when, judged, save, verbs):
            self.life.once(self.settings)

    def _pass(self, settings: Any) -> None:
        self.life.once(settings)

    @invariant()
    def nothing_half_made_is_published(self) -> None:
        if not hasattr(self, "life"):
            return
        for name in self.manifests():
            report = verify(f"{self.life.published.url}/{name}")
            assert report.ok, report

    def manifests(self) -> list[str]:
        try:
            return self.life.manifests()
        except FileNotFoundError:
            return []

    def teardown(self) -> None:
        if not hasattr(self, "life"):
            return
        for _ in range(4):
            self.life.once(self.settings)
        before = [(o.name, o.identity) for o in self.life.published.objects()]
        told = len(self.life.told)
        last = self.life.once(self.settings)
        # One pass more only lets the cache catch up; then nothing is written any more.
        assert last.steps == []
        assert [(o.name, o.identity) for o in self.life.published.objects()] == before
        assert len(self.life.told) == told
        held = {name for name, _ in before if f"/{PREFIX}" in name}
        assert held <= {f".ledger/{PREFIX}probe"}
        self.all_good_steps_are_published()
        self.latest_is_the_highest()
        self.each_problem_was_told()
        self.nothing_was_published_after_it_was_saved_over()

    def nothing_was_published_after_it_was_saved_over(self) -> None:
        for number in self.saved:
            for listing, published in self.replaced.items():
                key = self.life.ledger.find(f"step_{number}", listing)
                if key is not None:
                    name = f"{key.step}/{key.short}/manifest.json"
                    assert name in published or name not in self.manifests()

    def all_good_steps_are_published(self) -> None:
        for number, kind in self.saved.items():
            step = f"step_{number}"
            present = self.life.ledger.find(step, self.listing(step))
            assert present is not None
            records = self.life.ledger.stages(present)
            published = self.life.published.exists(f"{step}/{present.short}/manifest.json")
            assert ("published" in records) == published == (kind == "good"), (step, kind, records)

    def latest_is_the_highest(self) -> None:
        alias = current_alias(self.life.published)
        steps = [int(name.split("/")[0].removeprefix("step_")) for name in self.manifests()]
        if steps:
            assert alias is not None
            assert alias.step_number == max(steps)
            assert self.life.published.exists(alias.manifest)
            numbers = [o.name for o in self.life.published.child("aliases/latest").objects()]
            assert numbers == [f"{number:08d}.json" for number in range(1, len(numbers) + 1)]

    def each_problem_was_told(self) -> None:
        """Every bad step's present bytes were told, each problem once, or twice where a sender died."""
        told: dict[tuple[str, str, str], int] = {}
        for alert in self.life.told:
            key = (alert.step, alert.fingerprint, alert.problem)
            told[key] = told.get(key, 0) + 1
        assert sum(count - 1 for count in told.values()) <= self.crashes
        assert all(count <= 2 for count in told.values())
        for number, kind in self.saved.items():
            if kind != "good":
                step = f"step_{number}"
                present = self.life.ledger.find(step, self.listing(step))
                assert present is not None
                records = self.life.ledger.stages(present)
                assert "alerted" in records
                # Only where two senders died one after the other may it have reached nobody.
                reached = any(
                    (step, present.fingerprint, p) in told for p in ("torn", "incomplete", "invalid")
                )
                assert reached or self.crashes >= 2

    def listing(self, step: str) -> str:
        from dcp.checkpoint import survey

        return survey(f"{self.life.source.url}/{step}").listing_identity


def test_any_history_ends_well(tmp_path: Path) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    machine = type("Here", (Machine,), {"directory": tmp_path})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=10,
            stateful_step_count=8,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_every_single_crash_is_survived(tmp_path: Path) -> None:
    """The plainest history, with the crash before every write in turn, that is after the one before it."""
    for when in range(60):
        bucket = f"memory://bucket-{uuid.uuid4().hex}"
        open_store(bucket).replace("other", b"")
        life = Lifecycle(f"{bucket}/place", tmp_path / str(when))
        life.save("step_1")
        life.save("step_2", without=(".metadata",))
        current = life.settings(top=IMPATIENT)
        try:
            with struck(when, False, crash):
                life.once(current)
            assert when > 10
            return
        except CrashError:
            pass
        for _ in range(3):
            life.once(current)
        assert life.once(load_settings(current.file)).runs[0].unchanged == 2
        assert len(life.manifests()) == 1
        assert verify(f"{life.published.url}/{life.manifests()[0]}").ok
        assert len(life.told) in (1, 2)
        assert {alert.problem for alert in life.told} == {"incomplete"}
    raise AssertionError("a pass never came to an end")
