"""The cyclic collector is kept out of the way for a while, and then is what it was."""

import gc
from collections.abc import Iterator

import pytest

from dcp.collector import gc_paused, gc_settled


@pytest.fixture
def thawed() -> Iterator[None]:
    """Nothing is frozen, neither by tests/conftest.py, which does so for speed, nor by a library."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("thawed")
def test_what_exists_is_not_looked_through_until_the_end() -> None:
    with gc_settled():
        assert gc.get_freeze_count() > 0
        assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("thawed")
def test_what_somebody_else_has_frozen_stays_frozen() -> None:
    gc.freeze()
    with gc_settled():
        pass
    assert gc.get_freeze_count() > 0


def test_the_collector_is_as_it_was() -> None:
    with gc_paused():
        assert not gc.isenabled()
        with gc_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
