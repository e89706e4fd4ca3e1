"""Whole passes without Prefect, on every kind of store: what is published, told, and left alone."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from dcp.checkpoint import open_checkpoint
from dcp.records import Records
from dcp.storage import open_store
from dcp.storage.http import HttpClient
from flows.passes import survey_run
from flows.status import run_status
from tasks.publish import current_alias, publish_step, verify
from tests.support import golden
from tests.support.lifecycle import (
    OTHER_KEYS,
    RUN,
    SMALL,
    CrashError,
    Lifecycle,
    anywhere,
    outcomes,
)
from tests.support.web import webhook

# No machine can do it in so little memory: it fails, and succeeds once it is given more.
WRONG_EXPORT = "[[runs.exports]]\nmemory_budget = 1\n"


@pytest.fixture(params=["local", "memory", "gs", "s3"])
def everywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Lifecycle:
    return Lifecycle(anywhere(request.param, request, tmp_path), tmp_path / "settings")


@pytest.fixture
def here(tmp_path: Path) -> Lifecycle:
    return Lifecycle(str(tmp_path / "place"), tmp_path / "settings")


def test_good_steps_are_published_and_bad_ones_told_once(everywhere: Lifecycle) -> None:
    life = everywhere
    life.save("step_1")
    life.save("step_20")
    life.save("step_3", without=(".metadata",))
    life.save("step_4")
    life.cut("step_4")
    life.save("step_5", OTHER_KEYS)
    settings = life.settings(expectation="previous")
    report = life.once(settings)
    assert outcomes(report) == {
        "step_1": "published",
        "step_3": "incomplete",
        "step_4": "torn",
        "step_5": "key-mismatch",
        "step_20": "published",
    }
    assert report.exit_code == 1
    assert [alert.problem for alert in life.told] == ["incomplete", "torn", "key-mismatch"]
    assert len(life.manifests()) == 2
    for step in report.steps:
        if step.published:
            verdict = verify(step.published)
            assert verdict.ok, verdict
            assert (verdict.step, verdict.fingerprint) == (step.step, step.fingerprint)
    alias = current_alias(life.published)
    assert alias is not None
    assert (alias.step, alias.number) == ("step_20", 2)

    again = life.once(settings)
    assert outcomes(again) == {}
    assert (again.runs[0].unchanged, again.exit_code) == (5, 0)
    assert len(life.told) == 3


def test_the_published_file_holds_the_checkpoint(here: Lifecycle) -> None:
    import torch
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    here.save("step_1")
    [step] = here.once(here.settings()).steps
    loaded = torch.load(Path(str(step.published)) / "checkpoint.pt", weights_only=True)
    expected = next(g for g in golden.GOLDENS if g.name == SMALL).expected
    assert expected is not None
    flat, _ = flatten_state_dict(loaded)
    wanted = torch.load(expected, weights_only=True)
    assert flat.keys() == wanted.keys()
    assert all(torch.equal(flat[key], wanted[key]) for key in wanted)


@pytest.mark.slow
def test_steps_of_every_writer_are_published_or_named_for_what_they_are(here: Lifecycle) -> None:
    for number, one in enumerate(golden.GOLDENS):
        here.save(f"step_{number}", one.name)
    report = here.once(here.settings(layouts=["fsdp=2", "fsdp=3"]))
    named = {one.name: outcomes(report)[f"step_{number}"] for number, one in enumerate(golden.GOLDENS)}
    assert {name for name, outcome in named.items() if outcome != "published"} == {
        "not_dcp_verl_fsdp",
        "torch_hf_sharded",
    }
    assert set(named.values()) == {"published", "invalid"}
    for step in report.steps:
        assert step.published is None or verify(step.published).ok


def test_names_that_are_no_utf8_stop_nothing(here: Lifecycle) -> None:
    """A disk may hold them: beside steps, and beside the files of a step."""
    here.save("step_1")
    here.save("step_2", without=(".metadata",))
    source = Path(here.source.url)
    (source / "step_\udcff3").mkdir()
    for step in ("step_1", "step_2"):
        (source / step / "__9_\udcff.distcp").write_bytes(b"x")
    settings = here.settings()
    assert outcomes(here.once(settings)) == {"step_1": "published", "step_2": "incomplete"}
    report = here.once(settings)
    assert (report.runs[0].unchanged, report.runs[0].unknown) == (2, [])
    assert run_status(settings).runs[0].unknown == ["step_\\udcff3"]


def test_a_step_is_test_loaded_where_layouts_are_set(here: Lifecycle) -> None:
    here.save("step_1", "torch_fsdp_tp_2x2")
    [step] = here.once(here.settings(layouts=["fsdp=2", "fsdp=3"])).steps
    assert step.outcome == "published"
    [key] = here.ledger.keys("step_1")
    layouts = here.ledger.read(key, "test-loaded").facts["layouts"]
    assert [(layout["layout"], layout["ok"]) for layout in layouts] == [("fsdp=2", True), ("fsdp=3", True)]


def test_a_resaved_step_goes_through_again_and_takes_latest(everywhere: Lifecycle) -> None:
    life = everywhere
    settings = life.settings()
    life.save("step_1")
    first = life.once(settings).steps[0]
    life.save("step_1", OTHER_KEYS)
    second = life.once(settings).steps[0]
    assert second.outcome == "published"
    assert second.fingerprint != first.fingerprint
    assert len(life.manifests()) == 2
    alias = current_alias(life.published)
    assert alias is not None
    assert alias.fingerprint == second.fingerprint
    assert verify(str(first.published)).ok
    assert outcomes(life.once(settings)) == {}


def test_files_of_a_save_that_was_saved_over_before_its_publication_are_removed(
    everywhere: Lifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = everywhere
    settings = life.settings()
    life.save("step_1")

    def overtaken(*args: Any, **kwargs: Any) -> Any:
        life.save("step_1", OTHER_KEYS)
        return publish_step(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("flows.stages.publish_step", overtaken)
        first = life.once(settings).steps[0]
    assert first.problem == "torn"
    left = f"step_1/{str(first.fingerprint)[:8]}/"
    assert [o.name for o in life.published.objects() if o.name.startswith(left)] != []
    second = life.once(settings).steps[0]
    assert second.outcome == "published"
    assert [o.name for o in life.published.objects() if o.name.startswith(left)] == []
    [swept] = [key for key, stages in life.ledger.keys("step_1").items() if "swept" in stages]
    assert swept.fingerprint == first.fingerprint
    # What was published stays, whatever became of its manifest.
    published = f"step_1/{str(second.fingerprint)[:8]}"
    life.published.remove(f"{published}/manifest.json")
    life.save("step_1")
    assert life.once(settings).steps[0].outcome == "published"
    assert f"{published}/checkpoint.pt" in {o.name for o in life.published.objects()}
    assert outcomes(life.once(settings)) == {}


def test_latest_does_not_move_back_to_a_late_older_step(here: Lifecycle) -> None:
    settings = here.settings()
    here.save("step_20")
    here.once(settings)
    here.save("step_9")
    assert outcomes(here.once(settings)) == {"step_9": "published"}
    alias = current_alias(here.published)
    assert alias is not None
    assert (alias.step, alias.number) == ("step_20", 1)


def test_newest_first_is_a_policy(here: Lifecycle) -> None:
    for number in (9, 10, 100):
        here.save(f"step_{number}")
    report = here.once(here.settings(order="newest-first"))
    assert [step.step for step in report.steps] == ["step_100", "step_10", "step_9"]
    assert [step.step for step in here.once(here.settings()).steps] == []


def test_a_step_that_is_being_written_waits(here: Lifecycle) -> None:
    settings = here.settings(grace_period="1h")
    here.save("step_1", without=(".metadata",))
    report = here.once(settings)
    assert (outcomes(report), report.runs[0].writing) == ({}, ["step_1"])
    assert not here.ledger.objects()
    here.save("step_1")
    assert outcomes(here.once(settings)) == {"step_1": "published"}


def test_an_incomplete_step_that_is_finished_later_recovers(here: Lifecycle) -> None:
    settings = here.settings()
    here.save("step_1", without=(".metadata",))
    here.once(settings)
    here.save("step_1")
    here.once(settings)
    here.once(settings)
    assert [alert.problem for alert in here.told] == ["incomplete", "recovered"]
    assert "incomplete" in here.told[1].what


def test_unknown_directories_are_left_alone_and_reported_once(everywhere: Lifecycle) -> None:
    life = everywhere
    settings = life.settings()
    life.save("step_1")
    life.source.replace("logs/today.txt", b"x")
    life.source.replace("step_2.tmp/__0_0.distcp", b"x")
    assert life.once(settings).runs[0].unknown == ["logs", "step_2.tmp"]
    assert life.once(settings).runs[0].unknown == []
    life.source.replace("eval/x", b"x")
    assert life.once(settings).runs[0].unknown == ["eval"]
    assert survey_run(settings.runs[0], resend_after=60).idle


def test_the_source_is_never_written(here: Lifecycle) -> None:
    here.save("step_1")
    here.save("step_2", without=(".metadata",))
    before = [(o.name, o.identity) for o in here.source.objects()]
    directories = {path: path.stat().st_mtime_ns for path in Path(here.source.url).rglob("*")}
    here.once(here.settings())
    assert [(o.name, o.identity) for o in here.source.objects()] == before
    assert {path: path.stat().st_mtime_ns for path in Path(here.source.url).rglob("*")} == directories


def test_parts_are_one_step(here: Lifecycle) -> None:
    settings = here.settings(parts=["pytorch_model_fsdp_0", "optimizer_0"], grace_period="1h")
    here.save("step_1", "accelerate_fsdp2", without=("optimizer_0/.metadata",))
    assert here.once(settings).runs[0].writing == ["step_1"]
    assert outcomes(here.once(here.settings(parts=["pytorch_model_fsdp_0", "optimizer_0"]))) == {
        "step_1": "incomplete"
    }
    here.save("step_1", "accelerate_fsdp2")
    [step] = here.once(settings).steps
    assert step.outcome == "published"
    names = {file.name for file in verify(str(step.published)).files}
    assert names == {"optimizer_0/checkpoint.pt", "pytorch_model_fsdp_0/checkpoint.pt", "report.html"}


def test_a_part_that_was_begun_is_waited_for_without_being_named(here: Lifecycle) -> None:
    here.save("step_1", "accelerate_fsdp2", without=("optimizer_0/.metadata",))
    assert outcomes(here.once(here.settings())) == {"step_1": "incomplete"}
    assert not here.manifests()


def test_a_step_that_is_being_removed_raises_no_alarm(here: Lifecycle) -> None:
    settings = here.settings(grace_period="1h")
    here.save("step_1")
    here.save("step_2")
    here.once(settings)
    for name in ("step_1/.metadata", "step_2/__0_0.distcp"):
        here.source.remove(name)
        report = here.once(settings)
        assert outcomes(report) == {}
        assert report.runs[0].writing
    assert here.told == []
    # What stays like this was damaged and not removed.
    assert outcomes(here.once(here.settings())) == {"step_1": "incomplete", "step_2": "torn"}
    assert outcomes(here.once(here.settings())) == {}


def test_a_scrub_finds_what_the_index_does_not_show(here: Lifecycle) -> None:
    here.save("step_1", "torch_fsdp_tp_2x2")
    step = here.source.child("step_1")
    checkpoint = open_checkpoint(step)
    tensor = checkpoint.index.tensors[-1]
    place = Records(step, checkpoint.objects).locate(tensor, tensor.chunks[0])
    data = bytearray(step.read(place.name, 1 << 30))
    data[place.start] ^= 1
    step.replace(place.name, bytes(data))
    assert outcomes(here.once(here.settings(scrub=True, newer_tolerance="1h"))) == {"step_1": "invalid"}


def test_a_crashed_worker_does_not_do_again_what_was_done(
    here: Lifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.save("step_1")

    def die(*_: Any, **__: Any) -> None:
        raise CrashError

    with monkeypatch.context() as patch:
        patch.setattr("flows.stages.publish_step", die)
        with pytest.raises(CrashError):
            here.once(here.settings())
    [step] = here.once(here.settings()).steps
    assert [(stage.stage, stage.outcome) for stage in step.stages] == [
        ("validate", "skipped"),
        ("test-load", "skipped"),
        ("export", "skipped"),
        ("publish", "done"),
    ]
    here.save("step_2")
    with monkeypatch.context() as patch:
        patch.setattr("flows.stages.publish_step", die)
        with pytest.raises(CrashError):
            here.once(here.settings())
    for info in here.published.child("step_2").objects():
        here.published.remove(f"step_2/{info.name}")
    # The record says exported, the files are gone: they are made again.
    [step] = here.once(here.settings()).steps
    assert step.outcome == "published"
    assert verify(str(step.published)).ok


def test_what_is_no_dcp_is_invalid(here: Lifecycle) -> None:
    here.save("step_1", "not_dcp_verl_fsdp")
    assert outcomes(here.once(here.settings())) == {"step_1": "invalid"}


def test_a_run_that_cannot_be_reached_stops_no_other(here: Lifecycle) -> None:
    here.save("step_1")
    lost_run = f'[[runs]]\nname = "lost"\nsource = "{here.url}/nowhere"\npublish = "{here.url}/published"\n'
    report = here.once(here.settings(top=lost_run))
    lost, good = report.runs
    assert not lost.ok
    assert "nowhere" in str(lost.error)
    assert [step.outcome for step in good.steps] == ["published"]
    assert report.exit_code == 3


def test_a_stage_that_the_environment_fails_is_tried_again_and_then_told(here: Lifecycle) -> None:
    here.save("step_1")
    settings = here.settings(max_attempts=3, tables=WRONG_EXPORT)
    for attempt in (1, 2):
        report = here.once(settings)
        assert outcomes(report) == {"step_1": "export"}
        assert report.steps[0].outcome == "retry"
        assert report.steps[0].attempts == attempt
        assert report.exit_code == 3
        assert not here.told
    report = here.once(settings)
    assert (report.steps[0].outcome, report.exit_code) == ("problem", 1)
    assert [alert.problem for alert in here.told] == ["export"]
    assert "ckpt run" in here.told[0].command
    assert outcomes(here.once(settings)) == {}
    [records] = here.records("step_1")
    assert {"validated", "test-loaded", "failed-1", "failed-2", "failed-3", "alerted"} <= records
    assert "exported" not in records


def test_raising_the_limit_tries_again(here: Lifecycle) -> None:
    here.save("step_1")
    assert outcomes(here.once(here.settings(max_attempts=1, tables=WRONG_EXPORT))) == {"step_1": "export"}
    assert outcomes(here.once(here.settings(max_attempts=1))) == {}
    assert outcomes(here.once(here.settings(max_attempts=2))) == {"step_1": "published"}
    assert [alert.problem for alert in here.told] == ["export", "recovered"]


def test_a_finished_step_costs_no_request_of_its_own(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Lifecycle(anywhere("gs", request, tmp_path), tmp_path / "settings")
    settings = life.settings()
    calls: list[str] = []
    original = HttpClient._exchange

    def counted(self: HttpClient, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        calls.append(f"{method} {path}")
        return original(self, method, path, *args, **kwargs)

    def idle_requests() -> list[str]:
        calls.clear()
        assert life.once(settings).runs[0].steps == []
        return list(calls)

    life.save("step_1")
    life.save("step_2", without=(".metadata",))
    life.once(settings)
    life.once(settings)
    monkeypatch.setattr(HttpClient, "_exchange", counted)
    few = idle_requests()
    monkeypatch.setattr(HttpClient, "_exchange", original)
    for number in range(3, 9):
        life.save(f"step_{number}", without=(".metadata",) if number % 2 else ())
    life.once(settings)
    life.once(settings)
    monkeypatch.setattr(HttpClient, "_exchange", counted)
    assert len(idle_requests()) == len(few) == 3, (few, calls)


def test_sinks_get_the_alert_once_and_a_broken_one_stops_nothing(here: Lifecycle) -> None:
    with webhook() as good, webhook() as bad:
        bad.broken = True
        settings = here.settings('resend_after = "0s"', alerts=[good.url, bad.url])
        here.save("step_1", without=(".metadata",))
        here.save("step_2")
        report = here.once(settings)
        assert outcomes(report) == {"step_1": "incomplete", "step_2": "published"}
        [alert] = report.steps[0].alerts
        assert not alert.ok
        assert len(good.received) == 1
        assert f"[{RUN}] step_1" in good.received[0]["title"]
        assert "ckpt validate" in good.received[0]["message"]
        bad.broken = False
        assert here.once(settings).runs[0].redelivered == 1
        here.once(settings)
        assert (len(good.received), len(bad.received)) == (1, 1)


def test_the_memory_of_a_ledger_is_only_a_cache(here: Lifecycle) -> None:
    settings = here.settings()
    here.save("step_1")
    here.save("step_2", without=(".metadata",))
    here.once(settings)
    here.once(settings)
    open_store(here.ledger.store.url).replace("cache.json", b"{broken")
    assert outcomes(here.once(settings)) == {}
    here.ledger.store.remove("cache.json")
    assert outcomes(here.once(settings)) == {}
    assert here.ledger.store.exists("cache.json")
    for info in here.ledger.objects():
        if info.name.startswith("step_1/"):
            here.ledger.store.remove(info.name)
    # Everything known of the step is gone, so it is done again, and ends where it was published before.
    assert outcomes(here.once(settings)) == {"step_1": "published"}
    assert len(here.manifests()) == 1


def test_an_empty_directory_is_told_after_the_grace_period(
    here: Lifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Path(here.source.url) / "step_1"
    directory.mkdir(parents=True)
    (Path(here.source.url) / "step_2").symlink_to("nowhere")
    settings = here.settings(grace_period="10m")
    first = here.once(settings).runs[0]
    assert (first.writing, first.unknown) == (["step_1"], ["step_2"])
    assert here.once(settings).runs[0].writing == ["step_1"]
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 601)
    report = here.once(settings)
    assert outcomes(report) == {"step_1": "incomplete"}
    assert [alert.problem for alert in here.told] == ["incomplete"]
    assert here.once(settings).runs[0].unchanged == 1
    # A job that begins to write into it after all is not accused again.
    here.save("step_1", without=(".metadata",))
    os.utime(directory / next(path.name for path in directory.iterdir()), (now() + 600, now() + 600))
    assert here.once(settings).runs[0].writing == ["step_1"]
    assert len(here.told) == 1
