"""`latest` only moves forward by itself, anywhere by hand, and two writers never lose a move."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.errors import EnvironmentFault, UsageError
from dcp.storage import Store, open_store
from tasks.aliases import advance, aliases, current_alias, set_alias
from tasks.ledger import StepKey
from tasks.manifest import MANIFEST, Manifest, encode, published_directory
from tests.support.lifecycle import anywhere
from tests.tasks.test_ledger import race


def manifest(number: int, fingerprint: str = "ab" * 32) -> Manifest:
    return Manifest(
        run="run",
        step=f"step_{number}",
        number=number,
        source=f"gs://train/step_{number}",
        fingerprint=fingerprint,
        created="2026-01-01T00:00:00.000+00:00",
        who="test",
        files=[],
        artifacts=[],
        versions={},
        timings={},
        warnings=[],
    )


def publish(store: Store, number: int, fingerprint: str = "ab" * 32) -> Manifest:
    made = manifest(number, fingerprint)
    directory = published_directory(StepKey(made.step, fingerprint))
    store.replace(f"{directory}/{MANIFEST}", encode(made))
    return made


@pytest.fixture
def run_store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path)).child("run")


def leads_to(store: Store, alias: str = "latest") -> tuple[int, str]:
    record = current_alias(store, alias)
    assert record is not None
    return record.step_number, record.fingerprint[:2]


def test_it_moves_forward_by_itself_and_never_back(run_store: Store) -> None:
    assert current_alias(run_store) is None
    for number, expected in ((10, 10), (9, 10), (100, 100), (99, 100), (100, 100)):
        assert advance(run_store, manifest(number)).step_number == expected
    names = [o.name for o in run_store.child("aliases/latest").objects()]
    assert names == ["00000001.json", "00000002.json"]


def test_a_resaved_step_takes_the_place_of_its_older_self(run_store: Store) -> None:
    advance(run_store, manifest(10))
    assert advance(run_store, manifest(10, "cd" * 32)).fingerprint == "cd" * 32


def test_people_move_it_anywhere_and_it_stays_there_until_something_newer_comes(
    run_store: Store, tmp_path: Path
) -> None:
    for number in (10, 20, 30):
        advance(run_store, publish(run_store, number))
    record = set_alias(str(tmp_path), "run", "step_10", "ab" * 32)
    assert (record.number, record.reason, record.highest) == (4, "set", 30)
    assert leads_to(run_store) == (10, "ab")
    # Late steps, and a worker that resumes a publication already done, do not undo what people did.
    for number in (20, 25, 30):
        assert advance(run_store, manifest(number)).step_number == 10
    assert advance(run_store, manifest(30, "cd" * 32)).fingerprint == "cd" * 32
    assert advance(run_store, manifest(40)).step_number == 40


def test_only_what_is_published_can_be_named(run_store: Store, tmp_path: Path) -> None:
    publish(run_store, 10)
    with pytest.raises(UsageError, match="is not published"):
        set_alias(str(tmp_path), "run", "step_20", "ab" * 32)
    # As one types who leaves the fingerprint out.
    with pytest.raises(UsageError, match=r"but one below it: .*/run/step_10/abababab$"):
        set_alias(str(tmp_path.parent), tmp_path.name, "run", "step_10")
    for name in ("../x", "", "a/b", ".hidden"):
        with pytest.raises(UsageError, match="cannot be an alias"):
            set_alias(str(tmp_path), "run", "step_10", "ab" * 32, alias=name)
    set_alias(str(tmp_path), "run", "step_10", "abababab", alias="best")
    assert leads_to(run_store, "best") == (10, "ab")
    assert list(aliases(run_store)) == ["best"]


def test_a_damaged_record_is_named(run_store: Store) -> None:
    run_store.replace("aliases/latest/00000007.json", b"{}")
    with pytest.raises(EnvironmentFault, match=r"00000007\.json is no alias record"):
        advance(run_store, manifest(1))


def test_other_objects_are_ignored(run_store: Store) -> None:
    advance(run_store, manifest(1))
    for name in ("00000009.txt", "9.json", "x.json"):
        run_store.replace(f"aliases/latest/{name}", b"?")
    assert leads_to(run_store) == (1, "ab")


@pytest.mark.parametrize("kind", ["local", "memory", "gs", "s3"])
def test_racing_writers_end_at_the_highest(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url = anywhere(kind, request, tmp_path)
    race(5, lambda number: advance(open_store(url), manifest(number)))
    assert leads_to(open_store(url))[0] == 4
    numbers = [int(o.name[:8]) for o in open_store(url).child("aliases/latest").objects()]
    assert numbers == list(range(1, len(numbers) + 1))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_it_is_the_maximum_of_all_that_was_published(numbers: list[int]) -> None:
    import uuid

    store = open_store(f"memory://bucket/{uuid.uuid4().hex}")
    store.replace("other", b"")
    for count, number in enumerate(numbers, 1):
        assert advance(store, manifest(number)).step_number == max(numbers[:count])
