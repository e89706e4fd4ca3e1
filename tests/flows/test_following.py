"""What follows a publication runs once for every step, is tried again and told, and harms no publication."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dcp.errors import EnvironmentFault, SettingsError
from flows.lifecycle import process_step
from flows.passes import run_pass, watch_once
from flows.workshop import Workshop
from tasks.after import Publication, run_command
from tasks.publish import verify
from tests.support.lifecycle import RUN, CrashError, Lifecycle, outcomes
from tests.support.passes import process_directly
from tests.support.waiting import until

HOOK = """
import json, os, sys
with open("calls", "a") as calls:
    calls.write(json.dumps({k: v for k, v in os.environ.items() if k.startswith("CKPT_")}) + "\\n")
print("evaluated")
sys.exit(os.path.exists("broken"))
"""


@pytest.fixture
def here(tmp_path: Path) -> Lifecycle:
    life = Lifecycle(str(tmp_path / "place"), tmp_path / "settings")
    life.directory.mkdir()
    (life.directory / "hook.py").write_text(HOOK)
    return life


def table(**values: Any) -> str:
    known = {"command": [sys.executable, "hook.py"], "max_attempts": 2, **values}
    lines = [f"{key} = {json.dumps(value)}" for key, value in known.items() if value is not None]
    return "\n".join(["[runs.after_publish]", *lines, ""])


def calls(life: Lifecycle) -> list[dict[str, str]]:
    file = life.directory / "calls"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_command_runs_once_for_every_published_step(here: Lifecycle) -> None:
    here.save("step_1")
    here.once(here.settings())
    settings = here.settings(tables=table())
    here.save("step_2")
    here.save("step_3", without=(".metadata",))
    [two, _] = here.once(settings).steps
    assert two.after is not None
    assert (two.after.ok, two.after.message) == (True, "evaluated")
    for _ in range(2):
        assert outcomes(here.once(settings)) == {}
    # What was published before nobody asked for it is left alone.
    [told] = calls(here)
    assert (told["CKPT_RUN"], told["CKPT_STEP"], told["CKPT_NUMBER"]) == (RUN, "step_2", "2")
    assert told["CKPT_MANIFEST"] == f"{two.published}/manifest.json"
    assert told["CKPT_FINGERPRINT"] == two.fingerprint
    assert verify(told["CKPT_PUBLISHED"]).ok


def test_a_command_that_fails_is_tried_again_told_and_recovers(here: Lifecycle) -> None:
    (here.directory / "broken").touch()
    settings = here.settings(tables=table())
    here.save("step_1")
    first = here.once(settings)
    assert (outcomes(first), first.exit_code, here.told) == ({"step_1": "published"}, 3, [])
    assert first.steps[0].after is not None
    assert first.steps[0].after.message.endswith("ended with exit code 1: evaluated")
    second = here.once(settings)
    assert [alert.problem for alert in here.told] == ["after-publish"]
    assert f"ckpt run {here.source.url}/step_1" in here.told[0].command
    [key] = here.ledger.keys("step_1")
    assert here.told[0].since == here.ledger.read(key, "after-failed-1").when
    assert second.steps[0].outcome == "published"
    assert verify(str(second.steps[0].published)).ok
    assert outcomes(here.once(settings)) == {}
    assert len(calls(here)) == 2
    (here.directory / "broken").unlink()
    workshop = Workshop.of(settings, RUN, emit=here.told.append)
    by_hand = process_step(workshop, "step_1", force=True)
    assert by_hand.after is not None
    assert by_hand.after.ok
    assert [alert.problem for alert in here.told] == ["after-publish", "after-publish-recovered"]
    assert len(calls(here)) == 3
    assert process_step(workshop, "step_1", force=True).after is None


@pytest.mark.parametrize("record", ["published", "after-done", "after-failed-1", "alerted"])
def test_a_worker_that_dies_in_between_neither_loses_it_nor_its_alert(
    here: Lifecycle, monkeypatch: pytest.MonkeyPatch, record: str
) -> None:
    if record in ("after-failed-1", "alerted"):
        (here.directory / "broken").touch()
    settings = here.settings(top='lease_expiry = "0s"\nresend_after = "0s"', tables=table(max_attempts=1))
    here.save("step_1")
    create = type(here.ledger).create

    def dying(ledger: Any, key: Any, stage: str, facts: Any = None) -> bool:
        if stage == record:
            raise CrashError
        return create(ledger, key, stage, facts)

    with monkeypatch.context() as patch:
        patch.setattr(type(here.ledger), "create", dying)
        with pytest.raises(CrashError):
            here.once(settings)
    for _ in range(2):
        here.once(settings)
    assert outcomes(here.once(settings)) == {}
    [records] = here.records("step_1")
    broken = record in ("after-failed-1", "alerted")
    assert ("after-done" in records) is not broken
    # At least once: what ended without a record is done again.
    assert len(calls(here)) == (2 if record.startswith("after-") else 1)
    assert [alert.problem for alert in here.told] == (["after-publish"] if broken else [])


def test_the_event_comes_for_every_published_step_and_harms_nothing(here: Lifecycle) -> None:
    settings = here.settings()
    here.save("step_1")
    heard: list[Publication] = []

    def failing(_: Publication) -> None:
        raise ConnectionError("no server")

    run_pass(settings, process_directly(settings, announce=heard.append))
    here.save("step_2")
    report = run_pass(settings, process_directly(settings, announce=failing))
    assert outcomes(report) == {"step_2": "published"}
    [one] = heard
    assert (one.event, one.resource) == ("checkpoint.published", f"checkpoint.{RUN}.step_1")
    assert one.payload["manifest"].endswith("/manifest.json")
    assert watch_once(settings).runs[0].unchanged == 2


def test_a_deployment_is_started_under_a_key_of_the_bytes(here: Lifecycle) -> None:
    tables = (
        '[runs.after_publish]\ndeployment = "evaluate/nightly"\nmax_attempts = 1\n'
        "parameters = { suite = 3 }\n"
    )
    settings = here.settings(tables=tables)
    here.save("step_1")
    started: list[tuple[str, Mapping[str, Any], str]] = []

    def deploy(name: str, parameters: Mapping[str, Any], key: str) -> str:
        started.append((name, parameters, key))
        return "calm-otter"

    report = process_step(Workshop.of(settings, RUN, deploy=deploy), "step_1")
    [(name, parameters, key)] = started
    assert (name, parameters) == (
        "evaluate/nightly",
        {"suite": 3, "manifest": f"{report.published}/manifest.json"},
    )
    assert str(report.fingerprint) in key
    assert report.after is not None
    assert "calm-otter" in report.after.message
    here.save("step_2")
    alone = process_step(Workshop.of(settings, RUN), "step_2")
    assert alone.after is not None
    assert (alone.outcome, alone.after.ok) == ("published", False)


PUBLICATION = Publication("r", "step_1", 1, "ab" * 32, "/p", "/p/manifest.json", 1, 2)


def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    child = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(77)"
    hanging = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with pytest.raises(EnvironmentFault, match="took longer than 3 s"):
        run_command([sys.executable, "-c", hanging], PUBLICATION, directory=str(tmp_path), timeout=3)
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_what_a_command_prints_is_bounded(tmp_path: Path) -> None:
    loud = "print('x' * 5_000_000); print('\\x1b[31mend')"
    said = run_command([sys.executable, "-c", loud], PUBLICATION, directory=str(tmp_path), timeout=60)
    assert len(said) <= 500
    assert said.endswith("[31mend")
    assert "\x1b" not in said


FLOOD = """
import os, time
most = 0
while (size := os.fstat(1).st_size) >= most:
    most = size
    os.write(1, b"x" * (1 << 20))
    time.sleep(0.002)
os.write(1, b"and the end")
"""


def test_a_command_that_floods_fills_no_disk(tmp_path: Path) -> None:
    # It ends once what it had printed was cut off.
    said = run_command([sys.executable, "-c", FLOOD], PUBLICATION, directory=str(tmp_path), timeout=60)
    assert said.endswith("and the end")


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="nowhere cannot be started: No such file"):
        run_command(["nowhere"], PUBLICATION, directory=str(tmp_path), timeout=1)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("timeout = 3", "should have either command or deployment"),
        ('command = "x"\ndeployment = "a/b"', "should have either command or deployment"),
        ('deployment = "ab"', "should be written as flow/deployment"),
        ('command = "x"\nparameters = { a = 1 }', "parameters are for a deployment"),
    ],
)
def test_settings_that_make_no_sense(here: Lifecycle, lines: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        here.settings(tables=f"[runs.after_publish]\n{lines}\n")
