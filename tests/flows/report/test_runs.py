"""What is gathered of a run: from a ledger that the lifecycle really wrote."""

from dataclasses import replace
from pathlib import Path

import pytest

from dcp.errors import EnvironmentFault
from flows.report.charts import Scale, bars, outline, stacked
from flows.report.making import link_from, published_page, report_runs
from flows.report.run_charts import step_charts
from flows.report.run_page import _summary, render_runs, verdict_of
from flows.report.runs import RunFacts, gather_runs
from flows.report.saving import PAGE
from flows.settings import LifecycleSettings
from flows.status import run_status
from tasks.manifest import read_manifest
from tasks.verify import verify
from tests.support.lifecycle import OTHER_KEYS, RUN, Lifecycle


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Lifecycle:
    """Two good steps that hold the same, then an unfinished and a torn one."""
    place = tmp_path_factory.mktemp("life")
    life = Lifecycle(str(place / "bucket"), place)
    life.save_good_and_bad()
    return life


@pytest.fixture(scope="module")
def settings(life: Lifecycle) -> LifecycleSettings:
    settings = life.settings(scrub=True)
    life.once(settings)
    return settings


@pytest.fixture
def run(settings: LifecycleSettings) -> RunFacts:
    [run] = gather_runs(settings).runs
    return run


def test_it_answers_which_are_safe_which_is_latest_and_what_is_wrong(run: RunFacts) -> None:
    assert [step.name for step in run.safe] == ["step_1", "step_2"]
    assert run.latest is not None
    assert run.latest.name == "step_2"
    assert [(step.name, step.word) for step in run.wrong] == [("step_3", "incomplete"), ("step_4", "torn")]
    verdict = verdict_of(run)
    assert (verdict.tone, verdict.word) == ("warn", "Look at it")
    assert verdict.sentence == "2 steps of 4 cannot be trusted. Resume from step_2."
    assert {alert.problem for alert in run.alerts} == {"incomplete", "torn"}


def test_problems_come_with_advice(run: RunFacts) -> None:
    [problem] = run.wrong[1].problems
    assert problem.code == "files.truncated"
    assert "Restore the object's older version" in problem.advice


def test_stages_have_their_time_and_unchanged_tensors_are_counted(run: RunFacts) -> None:
    first, second, *_ = run.steps
    assert all(stage.state == "done" and stage.seconds is not None for stage in second.stages)
    assert first.unchanged is None
    assert (second.unchanged, second.tensors) == (5, 5)
    assert second.norms.keys() == first.norms.keys() != set()
    titles = [chart.title for chart in step_charts(run.steps)]
    assert "Size of each step" in titles
    assert "What the stages took" in titles
    assert "Tensors that did not change since the published step before" in titles
    assert "Norms by first part of the key, logarithmic" in titles


def test_a_run_that_is_well_says_so(run: RunFacts) -> None:
    good = replace(run, counts={"published": 2}, steps=run.safe)
    assert verdict_of(good).word == "Healthy"
    assert verdict_of(replace(run, steps=(), counts={})).word == "No steps"
    assert verdict_of(replace(run, error="no route")).tone == "bad"


def test_nothing_is_called_healthy_before_a_step_was_proven(run: RunFacts) -> None:
    waiting = replace(run.steps[0], state="waiting", aliases=())
    verdict = verdict_of(replace(run, counts={"waiting": 1}, steps=(waiting,), latest=None))
    assert (verdict.tone, verdict.word) == ("calm", "Nothing proven")
    bad = verdict_of(replace(run, counts={"problem": 2}, steps=run.wrong, latest=None))
    assert (bad.tone, bad.word) == ("bad", "No safe step")
    assert bad.sentence == "2 steps of 2 cannot be trusted. No step is published yet."


def test_a_run_without_its_latest_names_another_step_to_resume_from(tmp_path: Path) -> None:
    life = Lifecycle(str(tmp_path / "bucket"), tmp_path)
    settings = life.settings(scrub=True)
    for step in ("step_1", "step_2"):
        life.save(step)
    life.once(settings)
    life.save("step_2", OTHER_KEYS)
    [run] = gather_runs(settings).runs
    assert verdict_of(run).sentence == "step_2, the latest, was saved over since: resume from step_1."
    told = {term: (value, more) for term, value, more in _summary(run)}
    assert told["Safe steps"][0] == "1 of 2"
    assert told["Not done yet"] == ("1", "1 waiting")
    assert told["Left aside"] == ("1", "1 replaced")
    assert told["Stored by the job"][1] == "2 steps"
    old, new = (step for step in run.steps if step.name == "step_2")
    assert (old.state, old.saved, old.interval) == ("replaced", None, None)
    assert new.saved is not None
    life.once(settings)
    [run] = gather_runs(settings).runs
    [norms] = [chart for chart in step_charts(run.steps) if chart.title.startswith("Norms")]
    assert {key for step in run.steps for key in step.norms} == {label for _, label in norms.keys}
    for step in ("step_1", "step_2"):
        for info in life.source.child(step).objects():
            life.source.remove(f"{step}/{info.name}")
    [run] = gather_runs(settings).runs
    said = verdict_of(run).sentence
    assert said == "step_2, the latest, is no longer in the bucket: only what was published is left."
    assert run.standing == 0


def test_a_run_that_nobody_watches_is_seen_to_stall(run: RunFacts) -> None:
    verdict = verdict_of(replace(run, stalled=True, quiet=7200.0, troubles=()))
    assert (verdict.tone, verdict.word) == ("warn", "Stalled")
    assert verdict.sentence == "Nothing was committed for 2 h. Resume from step_2."


def test_page_and_status_tell_one_rhythm(settings: LifecycleSettings, run: RunFacts) -> None:
    [status] = run_status(settings).runs
    assert run.usual_interval == status.saving.usual


def test_every_published_step_has_a_page_that_its_manifest_lists(life: Lifecycle, run: RunFacts) -> None:
    for step in run.safe:
        assert step.published is not None
        store = life.published.child(step.published.split(f"/{RUN}/")[1])
        manifest = read_manifest(store)
        assert manifest is not None
        assert PAGE in {file.name for file in manifest.files}
        page = store.read(PAGE, 1 << 24).decode()
        assert "Every byte was read." in page
        assert "Norms by first part" in page
        assert verify(step.published).ok


def test_the_page_of_a_step_is_written_once(
    life: Lifecycle, settings: LifecycleSettings, run: RunFacts
) -> None:
    page = published_page(run.safe[0])
    assert page is not None
    manifest = page.with_name("manifest.json")
    before = page.read_bytes()
    listed = manifest.read_bytes()
    manifest.unlink()
    [record] = [
        o.name for o in life.ledger.objects() if o.name.startswith("step_1/") and "published" in o.name
    ]
    life.ledger.store.remove(record)
    try:
        assert {step.step for step in life.once(settings).steps} >= {"step_1"}
        assert page.read_bytes() == before
        assert verify(str(page.parent)).ok
    finally:
        if not manifest.exists():
            manifest.write_bytes(listed)


def test_a_run_may_do_without_pages(tmp_path: Path) -> None:
    life = Lifecycle(str(tmp_path / "bucket"), tmp_path)
    life.save("step_1")
    [step] = life.once(life.settings(report=False)).steps
    assert step.outcome == "published"
    assert not Path(str(step.published), PAGE).exists()
    assert verify(str(step.published)).ok


def test_a_page_that_cannot_be_made_keeps_no_step_from_being_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise RuntimeError("no ink")

    monkeypatch.setattr("flows.report.publication.render_checkpoint", fail)
    life = Lifecycle(str(tmp_path / "bucket"), tmp_path)
    life.save("step_1")
    [step] = life.once(life.settings()).steps
    assert step.outcome == "published"
    assert verify(str(step.published)).ok
    assert "no page for" in caplog.text
    assert "no ink" in caplog.text


def test_links_lead_to_pages_that_exist(settings: LifecycleSettings, run: RunFacts, tmp_path: Path) -> None:
    saved = report_runs(settings, None, str(tmp_path / "out" / "run.html"))
    link = link_from(saved.report)
    for step in run.steps:
        at = link(step)
        assert (at is not None) == (step.state == "published")
        if at is not None:
            assert (Path(saved.report).parent / at).resolve().is_file()
    assert link_from("gs://bucket/run.html")(run.steps[0]) is None
    assert (saved.kind, saved.verdict, saved.errors, saved.ok) == ("runs", "Look at it", 2, True)


def test_a_run_that_cannot_be_read_has_a_page(
    settings: LifecycleSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise EnvironmentFault("no route to bucket")

    monkeypatch.setattr("flows.status.survey_run", unreachable)
    facts = gather_runs(settings)
    page = render_runs(facts, lambda _: None)
    assert "Not readable" in page
    assert "no route to bucket" in page


def test_bars_fill_the_height_and_stay_inside() -> None:
    drawn = bars([1.0, 2.0, 4.0], ["a", "b", "c"])
    assert [bar.height for bar in drawn] == [50.0, 100.0, 200.0]
    assert all(bar.y + bar.height == 200.0 and 0 <= bar.x <= 720 - bar.width for bar in drawn)
    tower = stacked([[("x", 1.0), ("y", 3.0)]], [["x", "y"]])
    assert [(bar.y, bar.height) for bar in tower] == [(150.0, 50.0), (0.0, 150.0)]
    assert bars([0.0], ["nothing"])[0].height == 0
    assert outline([1, 2], 2) == "M0 200L0 100L360 100L360 0L720 0L720 200Z"


def test_a_logarithmic_axis_ends_at_powers_of_two() -> None:
    scale = Scale.of([3.0, 100.0, 0.0])
    assert (scale.low, scale.high) == (2.0, 128.0)
    assert (scale.at(2.0), scale.at(128.0), scale.at(16.0)) == (0.0, 1.0, 0.5)
    assert Scale.of([]).high > Scale.of([]).low
