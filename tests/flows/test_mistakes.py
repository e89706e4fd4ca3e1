"""Mistakes of the settings that only a pass can meet, and what must not be taken for a step that is gone."""

from pathlib import Path
from typing import NoReturn

import pytest

from dcp.errors import NotFoundError, SettingsError, UnreachableError
from flows.lifecycle import process_step
from flows.passes import PassReport, run_pass
from flows.settings import RunSettings
from flows.status import run_status
from flows.workshop import StepGoneError, StepReport, Workshop
from tests.support.lifecycle import RUN, Lifecycle, anywhere, outcomes


@pytest.fixture
def here(tmp_path: Path) -> Lifecycle:
    return Lifecycle(str(tmp_path / "place"), tmp_path / "settings")


@pytest.mark.parametrize(("document", "said"), [(None, "contract.json"), (b"{}", "is not a contract: keys")])
def test_a_contract_that_cannot_be_used_is_the_runs_own_mistake(
    document: bytes | None, said: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    life = Lifecycle(anywhere("gs", request, tmp_path), tmp_path / "settings")
    life.save("step_1")
    life.save("step_2")
    contract = life.source.child("contracts")
    contract.replace("contract.json", document or b"")
    settings = life.settings(expectation=f"{contract.url}/contract.json")
    if document is None:
        contract.remove("contract.json")
    report = life.once(settings)
    mistake = str(report.runs[0].mistake)
    assert (report.exit_code, report.runs[0].error) == (2, None)
    assert mistake.startswith("lifecycle.toml: runs[0].expectation: ")
    assert said in mistake
    assert all("failed-1" not in records for records in life.records("step_1"))


def test_whatever_is_wrong_with_one_run_the_others_are_seen_to(here: Lifecycle) -> None:
    here.save("step_1")
    other = f"""[[runs]]
name = "other"
source = "{here.source.url}"
publish = "{here.url}/elsewhere"
grace_period = 0
layouts = []
"""
    contract = here.directory / "contract.json"
    here.directory.mkdir(parents=True)
    contract.write_text('{"hello')
    report = here.once(here.settings(tables=other, expectation=str(contract)))
    assert outcomes(report) == {"step_1": "published"}
    assert [run.mistake is None for run in report.runs] == [False, True]
    here.save("step_2")

    def broken(run: RunSettings, step: str) -> StepReport:
        if run.name == RUN:
            raise KeyError("a fault of ours")
        return process_step(Workshop.of(settings, run.name), step)

    settings = here.settings(tables=other)
    report = run_pass(settings, broken)
    assert outcomes(report) == {"step_2": "published"}
    assert [run.error for run in report.runs] == ["internal error: KeyError: 'a fault of ours'", None]
    assert report.exit_code == 3


def test_a_contract_out_of_reach_is_the_environment(here: Lifecycle, monkeypatch: pytest.MonkeyPatch) -> None:
    here.save("step_1")
    settings = here.settings(expectation="gs://contracts/contract.json")
    monkeypatch.setattr("dcp.contract.open_parent", _out_of_reach)
    report = here.once(settings)
    assert (report.exit_code, report.runs[0].ok, outcomes(report)) == (3, False, {})
    assert "does not answer" in str(report.runs[0].error)


def _out_of_reach(location: str) -> NoReturn:
    raise UnreachableError(f"{location} does not answer", location)


def test_only_an_absent_step_is_passed_over(here: Lifecycle) -> None:
    here.save("step_1")
    settings = here.settings()

    def absent(error: type[NotFoundError]) -> PassReport:
        def process(_: RunSettings, step: str) -> NoReturn:
            raise error(f"nothing at {step}")

        return run_pass(settings, process)

    assert absent(StepGoneError).exit_code == 0
    report = absent(NotFoundError)
    assert (report.exit_code, report.runs[0].error) == (3, "nothing at step_1")


def test_a_step_that_is_gone(here: Lifecycle) -> None:
    here.save("step_2")
    with pytest.raises(StepGoneError):
        process_step(Workshop.of(here.settings(), RUN), "step_1")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('part = "model"', "wants the part model"),
        ('include = ["nope.*"]', "'nope.*' matches none of the keys"),
    ],
)
def test_a_setting_that_does_not_fit_a_step_is_no_fault_of_the_step(
    here: Lifecycle, table: str, said: str
) -> None:
    here.save("step_1")
    here.save("step_2", without=(".metadata",))
    wrong = here.settings(max_attempts=1, tables=f"[[runs.exports]]\n{table}\n")
    for _ in range(2):
        report = here.once(wrong)
        [run] = report.runs
        assert (report.exit_code, run.ok, run.error) == (2, False, None)
        assert str(run.mistake).startswith("lifecycle.toml: runs[0].exports: export of step_1: ")
        assert said in str(run.mistake)
    # The other step was looked at nevertheless, and the mistake is told once however often it is met.
    assert [alert.problem for alert in here.told] == ["settings", "incomplete"]
    assert (here.told[0].title, said in here.told[0].what) == (
        "[demo] a setting does not fit its steps",
        True,
    )
    here.save("step_3")
    here.once(wrong)
    assert len(here.told) == 2
    [records] = here.records("step_1")
    assert not {record for record in records if record.startswith(("failed", "alerted"))}
    assert outcomes(here.once(here.settings())) == {"step_1": "published", "step_3": "published"}
    assert [(alert.problem, alert.title) for alert in here.told[2:]] == [
        ("recovered", "[demo] its settings fit again")
    ]


def test_another_mistake_is_told_too(here: Lifecycle) -> None:
    here.save("step_1")
    for part in ("model", "optim", "model"):
        here.once(here.settings(tables=f'[[runs.exports]]\npart = "{part}"\n'))
    assert [alert.problem for alert in here.told] == ["settings", "settings"]
    status = run_status(here.settings()).runs[0]
    assert [alert.problem for alert in status.alerts] == ["settings"]
    # Without the step there is nothing left that they do not fit.
    for info in here.source.objects():
        here.source.remove(info.name)
    here.save("step_2")
    here.once(here.settings())
    assert [alert.problem for alert in here.told[2:]] == ["recovered"]
    assert run_status(here.settings()).runs[0].alerts == []


def test_a_setting_that_does_not_fit_the_one_step_that_was_asked_for(here: Lifecycle) -> None:
    here.save("step_1")
    wrong = here.settings(tables='[[runs.exports]]\npart = "model"\n')
    with pytest.raises(
        SettingsError, match=r"^lifecycle\.toml: runs\[0\]\.exports: export of step_1: "
    ) as raised:
        process_step(Workshop.of(wrong, RUN), "step_1")
    assert raised.value.exit_code == 2
