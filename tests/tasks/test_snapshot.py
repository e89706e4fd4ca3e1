"""A snapshot reads each record once ever, believes only the listing, and rebuilds its cache from nothing."""

from pathlib import Path

import pytest

from dcp.storage.local import LocalStore
from tasks.ledger import Failure, Ledger, StepKey
from tasks.snapshot import CACHE, take_snapshot

KEY = StepKey("step_1", "ab" * 32)
OTHER = StepKey("step_1", "cd" * 32)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = Ledger.open(str(tmp_path), "run")
    ledger.create(KEY, "seen", {"listing": "one", "bytes": 7})
    ledger.fail(KEY, Failure(stage="export", problem="export", final=False, message="disk full"))
    ledger.fail(KEY, Failure(stage="export", problem="torn", final=True, message="saved over", errors=2))
    ledger.create(OTHER, "seen", {"listing": "two"})
    ledger.create(OTHER, "published", {"url": "x"})
    ledger.report_unknown(["logs", "tmp"])
    return ledger


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of objects that were read."""
    names: list[str] = []
    original = LocalStore.read_range

    def read_range(self: LocalStore, name: str, start: int, end: int) -> bytes:
        names.append(name)
        return original(self, name, start, end)

    monkeypatch.setattr(LocalStore, "read_range", read_range)
    return names


def test_it_says_what_the_records_say(ledger: Ledger) -> None:
    for _ in range(2):
        snapshot = take_snapshot(ledger, remember=True)
        assert snapshot.of(KEY) == {"seen", "failed-1", "failed-2"}
        assert snapshot.of(OTHER) == {"seen", "published"}
        assert snapshot.of(StepKey("step_2", "ab" * 32)) == set()
        assert snapshot.key_of("step_1", "one") == KEY
        assert snapshot.key_of("step_1", "two") == OTHER
        assert snapshot.key_of("step_1", "three") is None
        failure = snapshot.last_failure(KEY)
        assert failure is not None
        assert (failure["problem"], failure["final"], failure["errors"]) == ("torn", True, 2)
        assert snapshot.last_failure(OTHER) is None
        assert snapshot.unknown == {"logs", "tmp"}


def test_a_record_is_read_once(ledger: Ledger, reads: list[str]) -> None:
    take_snapshot(ledger, remember=True)
    assert len(reads) == 5
    reads.clear()
    take_snapshot(ledger, remember=True)
    assert reads == [CACHE]
    ledger.create(KEY, "alerted", {"problem": "torn"})
    reads.clear()
    snapshot = take_snapshot(ledger, remember=True)
    assert sorted(reads) == sorted([CACHE, f"step_1/{KEY.fingerprint}/alerted.json"])
    assert snapshot.summary(KEY, "alerted")["problem"] == "torn"


def test_readers_write_nothing(ledger: Ledger) -> None:
    assert take_snapshot(ledger, remember=False).key_of("step_1", "one") == KEY
    assert not ledger.store.exists(CACHE)


def test_the_cache_is_not_written_again_without_need(ledger: Ledger) -> None:
    take_snapshot(ledger, remember=True)
    before = ledger.store.info(CACHE).identity
    take_snapshot(ledger, remember=True)
    assert ledger.store.info(CACHE).identity == before


def test_a_deleted_record_is_forgotten(ledger: Ledger) -> None:
    take_snapshot(ledger, remember=True)
    ledger.store.remove(f"step_1/{KEY.fingerprint}/seen.json")
    ledger.store.remove(f"step_1/{KEY.fingerprint}/failed-2.json")
    snapshot = take_snapshot(ledger, remember=True)
    assert snapshot.key_of("step_1", "one") is None
    failure = snapshot.last_failure(KEY)
    assert failure is not None
    assert failure["problem"] == "export"


def test_a_record_written_anew_by_hand_is_believed(ledger: Ledger) -> None:
    take_snapshot(ledger, remember=True)
    name = f"step_1/{KEY.fingerprint}/failed-2.json"
    ledger.store.replace(name, ledger.store.read(name, 10_000).replace(b'"final": true', b'"final": false'))
    failure = take_snapshot(ledger, remember=True).last_failure(KEY)
    assert failure is not None
    assert failure["final"] is False


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b'{"schema_version": 1}',
        b'{"schema_version": 3}',
        b'{"records": {"step_1": 3}}',
        b'{"unknown": {"x": [1]}}',
    ],
)
def test_a_damaged_cache_is_built_anew(ledger: Ledger, content: bytes) -> None:
    ledger.store.replace(CACHE, content)
    assert take_snapshot(ledger, remember=True).key_of("step_1", "one") == KEY
    assert ledger.store.read(CACHE, 10_000) != content
