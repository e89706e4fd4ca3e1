"""The ledger on every store: one winner of any race, nothing lost, nothing overwritten."""

import json
import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.errors import EnvironmentFault, NotFoundError, UnreachableError
from dcp.storage import Store, open_store
from tasks.ledger import Failure, Ledger, StepKey, create_once, failures, parse_name
from tests.support.lifecycle import anywhere

KEY = StepKey("step_1", "ab" * 32)
FAILURE = Failure(stage="export", problem="export", final=False, message="disk full")


@pytest.fixture(params=["local", "memory", "gs", "s3"])
def everywhere(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return anywhere(request.param, request, tmp_path)


def race(count: int, act: Callable[[int], Any]) -> list[Any]:
    """What `count` threads that begin at the same moment return."""
    barrier = threading.Barrier(count)
    results: list[Any] = [None] * count

    def run(number: int) -> None:
        barrier.wait()
        results[number] = act(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_a_record_is_created_once_and_never_changed(everywhere: str) -> None:
    ledger = Ledger.open(everywhere, "run")
    assert ledger.create(KEY, "validated", {"warnings": 2})
    assert not Ledger.open(everywhere, "run").create(KEY, "validated", {"warnings": 3})
    record = ledger.read(KEY, "validated")
    assert (record.run, record.step, record.fingerprint) == ("run", "step_1", KEY.fingerprint)
    assert record.facts == {"warnings": 2}
    assert record.when.endswith("+00:00")
    assert abs(record.at - ledger.clock()) < 60
    assert ledger.stages(KEY) == {"validated"}
    name = f".ledger/step_1/{KEY.fingerprint}/validated.json"
    assert json.loads(open_store(everywhere).child("run").read(name, 1000))["schema_version"] == 1


def test_of_racing_threads_one_wins(everywhere: str) -> None:
    for stage in ("seen", "published", "alerted-torn"):
        wins = race(
            6, lambda number, stage=stage: Ledger.open(everywhere, "run").create(KEY, stage, {"n": number})
        )
        assert wins.count(True) == 1
        assert Ledger.open(everywhere, "run").read(KEY, stage).facts == {"n": wins.index(True)}


def test_of_racing_threads_each_failure_has_its_number(everywhere: str) -> None:
    numbers = race(4, lambda _: Ledger.open(everywhere, "run").fail(KEY, FAILURE))
    assert sorted(numbers) == [1, 2, 3, 4]
    assert failures(Ledger.open(everywhere, "run").stages(KEY)) == [f"failed-{n}" for n in (1, 2, 3, 4)]


def _create_many(url: str, environment: dict[str, str], start: Any, wins: Any) -> None:
    os.environ.update(environment)
    ledger = Ledger.open(url, "run")
    ledger.stages(KEY)
    start.wait()
    wins.put([ledger.create(StepKey(f"step_{n}", "cd" * 32), "published") for n in range(20)])


@pytest.mark.parametrize("kind", ["local", "gs", "s3"])
def test_of_racing_processes_one_wins(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url = anywhere(kind, request, tmp_path)
    spawn = multiprocessing.get_context("spawn")
    start, queue = spawn.Barrier(2), spawn.Queue()
    environment = {k: v for k, v in os.environ.items() if k.startswith(("AWS", "STORAGE", "GCSFS"))}
    arguments = (url, environment, start, queue)
    workers = [spawn.Process(target=_create_many, args=arguments, daemon=True) for _ in range(2)]
    for worker in workers:
        worker.start()
    one, other = (queue.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join(timeout=30)
        worker.close()
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_an_empty_ledger_is_no_error(everywhere: str) -> None:
    ledger = Ledger.open(everywhere, "run")
    assert (ledger.objects(), ledger.stages(KEY), ledger.keys("step_1")) == ([], frozenset(), {})
    assert ledger.find("step_1", "x") is None
    with pytest.raises(NotFoundError):
        ledger.read(KEY, "seen")


def test_a_step_is_found_by_its_listing(everywhere: str) -> None:
    ledger = Ledger.open(everywhere, "run")
    other = StepKey("step_1", "cd" * 32)
    ledger.create(KEY, "seen", {"listing": "one"})
    ledger.create(other, "seen", {"listing": "two"})
    assert ledger.find("step_1", "one") == KEY
    assert ledger.find("step_1", "two") == other
    assert ledger.find("step_1", "three") is None
    assert set(ledger.keys("step_1")) == {KEY, other}


class Doubtful(Store):
    """A real store whose next creations write, or do not write, and then report that nobody answered."""

    def __init__(self, store: Store, faults: list[bool]) -> None:
        self.store = store
        self.url = store.url
        self.options = store.options
        self.faults = faults

    def create(self, name: str, data: bytes) -> None:
        if self.faults:
            if self.faults.pop(0):
                self.store.create(name, data)
            raise UnreachableError("no answer", self.url)
        self.store.create(name, data)

    def __getattribute__(self, name: str) -> Any:
        if name in ("objects", "info", "read_range", "replace", "writer", "remove", "directories", "child"):
            return getattr(self.store, name)
        return super().__getattribute__(name)

    objects = directories = info = read_range = replace = writer = remove = child = None  # type: ignore[assignment]


@pytest.mark.parametrize("faults", [[True], [False], [False, True], [True, True], [False, False]])
def test_a_creation_in_doubt_is_settled_by_looking(tmp_path: Path, faults: list[bool]) -> None:
    store = open_store(str(tmp_path))
    assert create_once(Doubtful(store, list(faults)), "a", b"mine")
    assert not create_once(Doubtful(store, [True][:0]), "a", b"yours")
    store.create("b", b"theirs")
    assert not create_once(Doubtful(store, [False]), "b", b"mine")
    assert store.read("b", 10) == b"theirs"


def test_a_store_that_never_answers_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError):
        create_once(Doubtful(open_store(str(tmp_path)), [False] * 9), "a", b"mine")


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"run": 1}', b"\xff"])
def test_what_is_no_record_is_named(tmp_path: Path, content: bytes) -> None:
    ledger = Ledger.open(str(tmp_path), "run")
    ledger.store.replace(f"step_1/{KEY.fingerprint}/seen.json", content)
    with pytest.raises(EnvironmentFault, match=r"seen\.json is no ledger record"):
        ledger.read(KEY, "seen")


@pytest.mark.parametrize(
    ("step", "fingerprint", "stage"),
    [
        ("../step", "ab" * 32, "seen"),
        ("a/b", "ab" * 32, "seen"),
        ("", "ab" * 32, "seen"),
        ("step", "AB" * 32, "seen"),
        ("step", "ab" * 31, "seen"),
        ("step", "ab" * 32, "lost"),
        ("step", "ab" * 32, "failed-0"),
        ("step", "ab" * 32, "../seen"),
    ],
)
def test_other_names_are_never_written(tmp_path: Path, step: str, fingerprint: str, stage: str) -> None:
    with pytest.raises(ValueError, match="cannot name a ledger record"):
        Ledger.open(str(tmp_path), "run").create(StepKey(step, fingerprint), stage)
    assert not list(tmp_path.iterdir())


STAGES = st.sampled_from(
    [
        *("seen", "validated", "test-loaded", "exported", "published", "retired", "failed-1", "failed-23"),
        *("alerted", "alerted-key-mismatch", "alerted.outcome-1", "alerted-test-load.try-2"),
    ]
)
STEPS = st.from_regex(r"[A-Za-z0-9_=.-]{1,20}", fullmatch=True)


@given(step=STEPS, stage=STAGES, digits=st.binary(min_size=32, max_size=32))
def test_names_parse_back(step: str, stage: str, digits: bytes) -> None:
    assert parse_name(f"{step}/{digits.hex()}/{stage}.json") == (StepKey(step, digits.hex()), stage)


@given(st.text())
def test_other_names_parse_to_nothing(name: str) -> None:
    assert parse_name(name) is None
