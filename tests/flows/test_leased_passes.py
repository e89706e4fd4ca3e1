"""Passes beside a worker that is at it: its step is left to it, until it is dead."""

from pathlib import Path

import pytest

from dcp.errors import BusyError
from dcp.storage import join_url
from flows.export_step import once_free
from flows.lifecycle import process_step
from flows.passes import survey_run, watch_once
from flows.workshop import Workshop
from tasks.export import ExportRequest, StepExport, export_step
from tasks.leases import PREFIX, Leases
from tasks.manifest import published_directory
from tests.support.lifecycle import RUN, Lifecycle, anywhere, outcomes

ELSEWHERE = ".partial-00000000-1-1-00000000"
"""The claim of a process of another machine."""


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


@pytest.fixture(params=["gs", "s3"])
def left_behind(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Lifecycle, str]:
    """A validated step whose exporter has died a moment ago on another machine, and that step's directory."""
    life = Lifecycle(anywhere(request.param, request, tmp_path), tmp_path / "settings")
    life.save("step_1")
    report = life.once(life.settings(exports=[]))
    assert outcomes(report) == {"step_1": "published"}
    [key] = life.ledger.keys("step_1")
    for record in ("exported", "published"):
        life.ledger.store.remove(f"step_1/{key.fingerprint}/{record}.json")
    for info in life.published.child("step_1").objects():
        life.published.remove(f"step_1/{info.name}")
    life.published.child(f"{published_directory(key)}/model").replace(ELSEWHERE, b"claimed\n")
    return life, published_directory(key)


SHARDS = """
[[runs.exports]]
format = "safetensors"
name = "model"
include = ["*weight*"]
"""


def test_the_claim_of_a_worker_that_died_is_no_failure(left_behind: tuple[Lifecycle, str]) -> None:
    life, directory = left_behind
    settings = life.settings(tables=SHARDS, max_attempts=1)
    for _ in range(2):
        report = life.once(settings)
        assert (outcomes(report), report.runs[0].leased, report.exit_code) == ({}, ["step_1"], 0)
    asked = process_step(Workshop.of(settings, RUN), "step_1", force=True)
    assert asked.outcome == "leased"
    assert "somebody else is writing to" in asked.message
    assert not asked.unreachable
    [records] = life.records("step_1")
    assert not any(record.startswith(("failed", "alerted")) for record in records)
    assert (life.told, life.manifests()) == ([], [])
    life.published.remove(f"{directory}/model/{ELSEWHERE}")
    assert outcomes(life.once(settings)) == {"step_1": "published"}
    assert life.told == []


def test_a_worker_of_a_pool_waits_until_the_place_is_free(left_behind: tuple[Lifecycle, str]) -> None:
    life, directory = left_behind

    def export() -> StepExport:
        return export_step(
            join_url(life.source.url, "step_1"),
            join_url(life.published.url, directory),
            parts=[],
            requests=[ExportRequest(format="safetensors", name="model", include=("*weight*",))],
            options={},
            publish_options={},
        )

    with pytest.raises(BusyError):
        once_free(export, patience=0.3, pause=0.1)
    attempts = []

    def attempt() -> StepExport:
        attempts.append(len(attempts))
        if len(attempts) == 3:
            life.published.remove(f"{directory}/model/{ELSEWHERE}")
        return export()

    assert once_free(attempt, patience=60, pause=0.1).artifacts[0].tensors
    assert len(attempts) == 3
