"""What a worker elsewhere leaves for the one that waits for it."""

from pathlib import Path

import pytest

from dcp.errors import CheckpointError, EnvironmentFault, ResourceError, UsageError
from dcp.storage import open_store
from tasks.export import StepExport
from tasks.handover import artifacts_of, hand_over_failure, hand_over_success, raise_failure
from tasks.ledger import Ledger, StepKey, parse_name
from tasks.outcomes import StageFailedError, failure_of_error

KEY = StepKey("step_1", "ab" * 32)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(open_store(str(tmp_path)), "demo")


def test_nothing_left_is_nothing_raised(ledger: Ledger) -> None:
    raise_failure(ledger, KEY, "1-ab")


def test_success_is_the_record_itself(ledger: Ledger) -> None:
    hand_over_success(ledger, KEY, StepExport(artifacts=[]), 1.5)
    assert artifacts_of(ledger, KEY) == []
    assert ledger.read(KEY, "exported").facts == {"artifacts": [], "seconds": 1.5}


@pytest.mark.parametrize(
    ("error", "final"),
    [(ResourceError("no memory"), False), (CheckpointError("cut off", code="files.truncated"), True)],
)
def test_a_failure_arrives_as_it_was(ledger: Ledger, error: Exception, final: bool) -> None:
    hand_over_failure(ledger, KEY, "1-ab", error)
    with pytest.raises(StageFailedError, match=str(error)) as caught:
        raise_failure(ledger, KEY, "1-ab")
    assert caught.value.failure == failure_of_error("export", error)
    assert failure_of_error("export", caught.value) == caught.value.failure
    assert caught.value.failure.final is final
    # Another attempt has another name, and neither is a record of the step.
    raise_failure(ledger, KEY, "2-ab")
    assert ledger.stages(KEY) == frozenset()
    assert all(parse_name(info.name) is None for info in ledger.objects())


def test_the_first_word_stands(ledger: Ledger) -> None:
    hand_over_failure(ledger, KEY, "1-ab", ResourceError("first"))
    hand_over_failure(ledger, KEY, "1-ab", ResourceError("second"))
    with pytest.raises(StageFailedError, match="first"):
        raise_failure(ledger, KEY, "1-ab")


def test_a_mistake_in_the_settings_stays_one(ledger: Ledger) -> None:
    hand_over_failure(ledger, KEY, "1-ab", UsageError("there is no such part"))
    with pytest.raises(UsageError, match="there is no such part"):
        raise_failure(ledger, KEY, "1-ab")


def test_what_cannot_be_read_is_the_environment(ledger: Ledger) -> None:
    ledger.store.replace(f"{KEY.step}/{KEY.fingerprint}/export-1-ab.json", b"{")
    with pytest.raises(EnvironmentFault, match="export-1-ab"):
        raise_failure(ledger, KEY, "1-ab")


@pytest.mark.parametrize("token", ["", "../x", "A", "a" * 81])
def test_a_token_is_a_plain_name(ledger: Ledger, token: str) -> None:
    with pytest.raises(UsageError):
        raise_failure(ledger, KEY, token)
