"""Passes beside a worker that is at it: its step is left to it, until it is dead."""

from pathlib import Path

import pytest

from flows.lifecycle import process_step
from flows.passes import survey_run, watch_once
from flows.workshop import Workshop
from tasks.leases import PREFIX, Leases
from tests.support.lifecycle import RUN, Lifecycle, outcomes


@pytest.fixture
def here(tmp_path: Path) -> Lifecycle:
    return Lifecycle(str(tmp_path / "place"), tmp_path / "settings")


def leases_of(life: Lifecycle) -> Leases:
    return Leases(life.ledger.store)


def test_a_step_of_a_living_worker_is_left_to_it(here: Lifecycle) -> None:
    here.save("step_1")
    here.save("step_2")
    settings = here.settings()
    other = leases_of(here).acquire("step_1")
    assert other is not None
    report = here.once(settings)
    assert (outcomes(report), report.runs[0].leased) == ({"step_2": "published"}, ["step_1"])
    assert report.exit_code == 0
    # Nothing else is due, so that no flow is begun.
    again = watch_once(settings)
    assert (again.runs[0].leased, again.runs[0].unchanged) == (["step_1"], 1)
    asked = process_step(Workshop.of(settings, RUN), "step_1", force=True)
    assert asked.outcome == "leased"
    other.release()
    assert outcomes(here.once(settings)) == {"step_1": "published"}


def test_a_step_of_a_dead_worker_is_taken_over(here: Lifecycle) -> None:
    here.save("step_1")
    assert leases_of(here).acquire("step_1") is not None
    assert here.once(here.settings()).runs[0].leased == ["step_1"]
    assert outcomes(here.once(here.settings(top='lease_expiry = "0s"'))) == {"step_1": "published"}


def test_what_a_worker_left_that_died_after_its_work_is_cleared_away(here: Lifecycle) -> None:
    here.save("step_1")
    settings = here.settings()
    here.once(settings)
    assert leases_of(here).acquire("step_1") is not None
    assert here.once(settings).runs[0].unchanged == 1
    survey_run(settings.runs[0], resend_after=60, lease_expiry=0)
    assert not leases_of(here).all()
    assert survey_run(settings.runs[0], resend_after=60).snapshot.leases == {}


def test_who_only_looks_writes_nothing(here: Lifecycle) -> None:
    here.save("step_1")
    assert leases_of(here).acquire("step_1") is not None
    before = here.ledger.objects()
    found = survey_run(here.settings().runs[0], resend_after=60, remember=False)
    assert (found.due, found.leased) == ((), ("step_1",))
    assert here.ledger.objects() == before


def test_a_worker_that_was_replaced_stops_before_it_publishes(
    here: Lifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.export import export_step

    here.save("step_1")
    taken = []

    def slow(*args: object, **kwargs: object) -> object:
        taken.append(Leases(here.ledger.store, 0).acquire("step_1"))
        return export_step(*args, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr("flows.stages.export_step", slow)
        report = here.once(here.settings())
    assert (outcomes(report), report.runs[0].leased) == ({}, ["step_1"])
    assert here.manifests() == []
    [records] = here.records("step_1")
    assert not any(record.startswith("failed") for record in records)
    [lease] = taken
    assert lease is not None
    lease.require()
    lease.release()
    assert outcomes(here.once(here.settings())) == {"step_1": "published"}
    assert {o.name for o in here.ledger.objects() if o.name.startswith(PREFIX)} <= {f"{PREFIX}probe"}
