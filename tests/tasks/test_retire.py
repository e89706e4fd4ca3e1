"""Policies compose, guards beat them; a deletion that dies anywhere is finished and deletes nothing new."""

import uuid
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.checkpoint import Survey
from dcp.errors import ChangedError
from dcp.storage import Store, open_store
from tasks.ledger import Ledger, StepKey
from tasks.retire import (
    Best,
    Decision,
    Directory,
    Every,
    Latest,
    NewerThan,
    Policy,
    delete_step,
    plan_retirement,
    put_into_trash,
    take_out_of_trash,
    trash_number,
)
from tests.support.lifecycle import CrashError, anywhere

NOW = 1_000_000.0
KEY = StepKey("step_1", "ab" * 32)


def step(number: int, **values: object) -> Directory:
    known = {"committed": NOW - 1000 * (100 - number), "good": not values.get("guarded"), **values}
    key = StepKey(f"step_{number}", "ab" * 32)
    return Directory(f"step_{number}", number, key, "listing", 7, 2, **known)  # type: ignore[arg-type]


def planned(policy: Policy, *steps: Directory, trash: float = 100, delete: bool = True) -> list[Decision]:
    return plan_retirement(steps, policy, now=NOW, trash=trash, delete=delete)


def kept(policy: Policy, *numbers: int) -> set[int]:
    decisions = planned(policy, *(step(number) for number in numbers))
    return {decision.number or 0 for decision in decisions if decision.action == "keep"}


def test_each_policy() -> None:
    assert kept(Latest(2), 1, 2, 3, 10) == {3, 10}
    assert kept(Every(5), 1, 5, 7, 10, 12) == {5, 10, 12}
    assert kept(Best(("step_2",)), 1, 2, 3) == {2, 3}
    assert kept(NewerThan(90_000), 1, 9, 10, 50) == {10, 50}


def test_policies_compose() -> None:
    assert kept(Latest(2) | Every(4), 1, 4, 5, 6, 7) == {4, 6, 7}
    assert kept(Latest(3) & Every(2), 1, 2, 4, 5, 6) == {4, 6}
    assert kept(Best(("step_1",)) | (Latest(3) & Every(2)), 1, 2, 4, 5, 6) == {1, 4, 6}
    [first, *_] = planned(Latest(1) | Every(1), step(1))
    assert first.why == "one of the latest 1, one of every 1"


def test_when_a_step_was_committed_is_unknown_it_is_kept() -> None:
    assert planned(NewerThan(1), step(1, committed=None), step(2))[0].action == "keep"


def test_what_is_not_good_is_kept_and_does_not_count() -> None:
    decisions = planned(Latest(1), step(1), step(2), step(3, guarded="it is being written"))
    assert [(d.action, d.why) for d in decisions] == [
        ("trash", "nothing keeps it"),
        ("keep", "one of the latest 1"),
        ("keep", "it is being written"),
    ]


def test_a_good_step_that_is_guarded_counts() -> None:
    aliased = step(3, guarded="the alias best leads to it", good=True)
    decisions = planned(Latest(1), step(1), step(2), aliased)
    assert [d.action for d in decisions] == ["trash", "trash", "keep"]
    assert planned(Latest(1), step(1, good=False), step(2))[0].action == "keep"


def test_the_trash_takes_its_time() -> None:
    fresh, old = step(1, trashed=NOW - 50), step(2, trashed=NOW - 101)
    assert [d.action for d in planned(Best(()), fresh, old, step(3))] == ["trash", "delete", "keep"]
    assert [d.action for d in planned(Best(()), fresh, old, step(3), delete=False)] == [
        "trash",
        "trash",
        "keep",
    ]
    # What is wanted again is kept, however long it was in the trash.
    assert planned(Latest(9), old, step(3))[0].action == "keep"


def test_a_deletion_that_was_begun_is_finished() -> None:
    begun = step(1, deleting=True, guarded="it was never committed")
    assert planned(Latest(5), begun, step(2))[0].action == "delete"
    assert planned(Latest(5), begun, step(2), delete=False)[0].action == "keep"


@given(
    numbers=st.lists(st.integers(1, 50), min_size=1, max_size=12, unique=True),
    guarded=st.sets(st.integers(1, 50)),
    latest=st.integers(1, 5),
    every=st.integers(1, 20),
)
def test_whatever_the_policy_a_good_step_is_left_and_no_guarded_one_goes(
    numbers: list[int], guarded: set[int], latest: int, every: int
) -> None:
    steps = [
        step(n, trashed=NOW - 1000, guarded="it is not published" if n in guarded else "") for n in numbers
    ]
    for policy in (Best(()), Latest(latest), Every(every), Latest(latest) & Every(every)):
        decisions = {d.number: d for d in planned(policy, *steps)}
        assert len(decisions) == len(numbers)
        assert all(decisions[n].action == "keep" for n in numbers if n in guarded)
        free = [n for n in numbers if n not in guarded]
        if free:
            assert decisions[max(free)].action == "keep"


@pytest.fixture(params=["local", "memory", "gs", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return anywhere(request.param, request, tmp_path)


NAMES = (".metadata", "__0_0.distcp", "__1_0.distcp", "sub/.metadata", "sub/__0_0.distcp")


def stored(place: str) -> tuple[Ledger, Store, str]:
    store = open_store(f"{place}/train/step_1")
    for name in NAMES:
        store.replace(name, uuid.uuid4().bytes)
    listing = Survey(store, {info.name: info for info in store.objects()}).listing_identity
    return Ledger.open(f"{place}/published", "run"), store, listing


def names(place: str) -> set[str]:
    store = open_store(f"{place}/train")
    try:
        return {info.name for info in store.objects()}
    except FileNotFoundError:
        return set()


def test_a_step_is_deleted_and_that_is_recorded(place: str) -> None:
    ledger, store, listing = stored(place)
    open_store(f"{place}/train").replace("step_2/x", b"x")
    assert delete_step(ledger, KEY, store, listing, "nothing keeps it") == len(NAMES)
    assert names(place) == {"step_2/x"}
    assert ledger.stages(KEY) == {"deleting", "retired"}
    facts = ledger.read(KEY, "retired").facts
    assert (facts["why"], facts["objects"]) == ("nothing keeps it", len(NAMES))
    # Once more does nothing.
    assert delete_step(ledger, KEY, store, listing, "again") == 0
    if "://" not in place:
        assert not Path(store.url).exists()


def test_a_step_that_was_saved_again_since_is_left_alone(place: str) -> None:
    ledger, store, listing = stored(place)
    store.replace("__1_0.distcp", b"new")
    with pytest.raises(ChangedError, match="written again"):
        delete_step(ledger, KEY, store, listing, "nothing keeps it")
    assert len(names(place)) == len(NAMES)
    assert ledger.stages(KEY) == set()


@pytest.mark.parametrize("dies_at", range(2 * len(NAMES) + 3))
def test_killed_anywhere_it_is_finished_and_never_looks_whole(
    dies_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, store, listing = stored(str(tmp_path))
    count = 0

    def step_towards_death(*_: object) -> None:
        nonlocal count
        if count == dies_at:
            raise CrashError
        count += 1

    with monkeypatch.context() as patch:
        for kind in {type(store), type(ledger.store)}:
            for verb in ("remove", "create", "info"):
                real = getattr(kind, verb)
                patch.setattr(kind, verb, lambda *args, real=real: (step_towards_death(), real(*args))[1])
        died = False
        try:
            delete_step(ledger, KEY, store, listing, "nothing keeps it")
        except CrashError:
            died = True
    assert died == (count == dies_at)
    left = names(str(tmp_path))
    # As long as an index is there nothing is missing, as long as anything is missing there is no index.
    assert len(left) == len(NAMES) or "step_1/.metadata" not in left
    # Meanwhile the job has begun to save the step anew.
    store.replace("__1_0.distcp", b"new")
    with suppress(ChangedError):
        delete_step(ledger, KEY, store, listing, "nothing keeps it")
    assert "step_1/__1_0.distcp" in names(str(tmp_path))
    if "retired" in ledger.stages(KEY):
        assert names(str(tmp_path)) == {"step_1/__1_0.distcp"}
    else:
        assert len(names(str(tmp_path))) == len(NAMES)


def test_the_way_into_the_trash_and_out(tmp_path: Path) -> None:
    ledger = Ledger.open(str(tmp_path), "run")
    put_into_trash(ledger, KEY, "nothing keeps it")
    put_into_trash(ledger, KEY, "nothing keeps it")
    assert trash_number(ledger.stages(KEY)) == 1
    take_out_of_trash(ledger, KEY, "one of the best")
    take_out_of_trash(ledger, KEY, "one of the best")
    assert trash_number(ledger.stages(KEY)) is None
    put_into_trash(ledger, KEY, "nothing keeps it")
    assert ledger.stages(KEY) == {"trashed-1", "restored-1", "trashed-2"}
    assert trash_number(ledger.stages(KEY)) == 2
