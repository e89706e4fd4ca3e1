"""The command that an alert says to type shows the very fault again that people were told of."""

import json
import shlex
from pathlib import Path

import pytest

from tests.flows.cli.ckpt import Ckpt
from tests.support.lifecycle import OTHER_KEYS, SMALL, Lifecycle
from tests.support.waiting import until


@pytest.fixture
def here(tmp_path: Path) -> Lifecycle:
    return Lifecycle(str(tmp_path / "a place"), tmp_path / "settings")


def typed(ckpt: Ckpt, command: str) -> tuple[int, str]:
    """Exit code and output of a command from an alert."""
    program, *arguments = shlex.split(command)
    assert program == "ckpt"
    done = ckpt(*arguments)
    return done.code, done.out + done.err


def test_other_keys_than_the_step_before(here: Lifecycle, ckpt: Ckpt) -> None:
    settings = here.settings(expectation="previous")
    here.save("step_1")
    here.save("step_2", OTHER_KEYS)
    here.once(settings)
    [alert] = here.told
    assert alert.problem == "key-mismatch"
    assert f"--against '{here.source.url}/step_1'" in alert.command
    code, output = typed(ckpt, alert.command)
    assert code == 1
    assert "keys.missing" in output
    assert "GOOD_STEP" not in alert.body
    assert "EARLIER_STEP" not in alert.body
    # Each command has a line's end to itself: copied with the line, it is all that is copied.
    assert [line.rpartition(": ")[2].split()[0] for line in alert.advice.splitlines()] == ["ckpt", "ckpt"]


@pytest.mark.parametrize("ignored", [["*_extra_state*"], []])
def test_other_keys_than_a_contract_has(here: Lifecycle, ckpt: Ckpt, ignored: list[str]) -> None:
    here.save("step_1", OTHER_KEYS)
    written = ckpt("contract", f"{here.source.url}/step_1")
    here.directory.mkdir(parents=True)
    contract = here.directory / "contract.json"
    contract.write_text(written.out)
    settings = here.settings(expectation=str(contract), ignore_keys=ignored)
    here.save("step_2", SMALL)
    here.once(settings)
    [alert] = here.told
    code, output = typed(ckpt, alert.command)
    assert (code, "keys.missing" in output) == (1, True)


def test_commands_can_be_typed_whatever_places_are_called(tmp_path: Path, ckpt: Ckpt) -> None:
    odd = tmp_path / "it's a place; $(touch no) & Füße"
    life = Lifecycle(str(odd / "-data"), odd / "settings of mine")
    contract = odd / "the keys.json"
    odd.mkdir()
    step = {"step_pattern": r".*step (\d+)"}
    life.save("-v step 1", OTHER_KEYS)
    contract.write_text(ckpt("contract", f"{life.source.url}/-v step 1").out)
    life.save("-v step 2")
    life.save("it's step 3", OTHER_KEYS)
    life.cut("it's step 3")
    life.save("$x step 4", OTHER_KEYS, without=(".metadata",))
    after = '[runs.after_publish]\ncommand = ["/no such/program"]\nmax_attempts = 1'
    life.once(life.settings(tables=after, expectation=str(contract), junk_size=1, junk_age="0s", **step))
    file = str(life.directory / "lifecycle.toml")
    kinds = []
    for alert in life.told:
        kinds.append(alert.problem)
        words = shlex.split(alert.command)
        if alert.problem in ("junk", "after-publish"):
            assert words[-2:] == ["--config", file]
        if alert.step:
            assert f"{life.source.url}/{alert.step}" in words
        if alert.problem == "junk":
            assert "$x step 4" in typed(ckpt, alert.command)[1]
        elif alert.problem != "after-publish":
            assert typed(ckpt, alert.command)[0] == 1
        for line in alert.advice.splitlines():
            if "ckpt " in line and "(ckpt" not in line:
                _, name, *given = shlex.split("ckpt " + line.rpartition("ckpt ")[2])
                assert {f"{life.source.url}/{alert.step}", "status"} & {name, *given}, line
    assert sorted(kinds) == ["after-publish", "incomplete", "junk", "key-mismatch", "torn"]


def test_damage_that_only_a_scrub_finds(here: Lifecycle, ckpt: Ckpt) -> None:
    settings = here.settings(scrub=True, copied=True)
    here.save("step_1")
    name = next(o.name for o in here.source.objects() if o.name.startswith("step_1/__"))
    data = bytearray(here.source.read(name, 1 << 30))
    at = data.rindex(b"PK\x01\x02") // 2
    data[at : at + 64] = bytes(byte ^ 0xFF for byte in data[at : at + 64])
    here.source.replace(name, bytes(data))
    here.once(settings)
    [alert] = here.told
    assert "--scrub --copied" in alert.command
    assert typed(ckpt, alert.command)[0] == 1


def test_a_save_that_the_run_gives_less_time_than_the_command_does(here: Lifecycle, ckpt: Ckpt) -> None:
    settings = here.settings(grace_period="0.5s")
    here.save("step_1", without=(".metadata",))
    until(lambda: here.once(settings).exit_code == 1)
    [alert] = here.told
    assert alert.problem == "incomplete"
    assert "--grace-period 0.5s" in alert.command
    code, output = typed(ckpt, alert.command)
    assert (code, "incomplete" in output) == (1, True)


def test_a_save_counts_as_being_written_for_the_grace_period(here: Lifecycle, ckpt: Ckpt) -> None:
    here.save("step_1", without=(".metadata",))
    url = f"{here.source.url}/step_1"
    for duration, state in (("1h", "writing"), ("0", "incomplete")):
        said = ckpt("validate", url, "--grace-period", duration, "--json")
        assert (said.code, json.loads(said.out)["state"]) == (1, state)
    said = ckpt("validate", url, "--grace-period", "soon")
    assert said.code == 2
    assert "should be a duration" in said.err
