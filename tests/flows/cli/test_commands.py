"""What the commands about one checkpoint print and return: the contract of their JSON and exit codes."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.flows.cli.ckpt import Ckpt
from tests.flows.cli.conftest import HOSTILE_KEYS
from tests.support.golden import GOLDENS, Golden

FINDING = {"code", "severity", "key", "file", "message", "detail"}
STATS = {"keys", "tensors", "chunks", "bytes", "files", "seconds"}


def test_inspect_says_what_there_is(ckpt: Ckpt, whole: Path) -> None:
    said = ckpt("inspect", whole, "--json")
    assert said.code == 0
    assert {"checkpoint", "producer", "keys", "files", "totals"} <= set(said.document)
    assert said.document["checkpoint"] == str(whole)
    assert all(
        {"key", "kind", "shape", "dtype", "chunks", "bytes"} == set(key) for key in said.document["keys"]
    )
    assert {key["kind"] for key in said.document["keys"]} == {"tensor", "bytes"}
    assert {file["name"] for file in said.document["files"]} == {path.name for path in whole.iterdir()}
    assert said.document["totals"]["tensors"] == 30


def test_inspect_keys_takes_a_glob(ckpt: Ckpt, whole: Path) -> None:
    everything = [key["key"] for key in ckpt("inspect", whole, "--json").document["keys"]]
    wanted = [key for key in everything if key.startswith("optim.")]
    assert 0 < len(wanted) < len(everything)
    said = ckpt("inspect", whole, "--json", "--keys", "optim.*")
    assert [key["key"] for key in said.document["keys"]] == wanted


def test_inspect_for_people_shows_every_key(ckpt: Ckpt, whole: Path) -> None:
    said = ckpt("inspect", whole)
    keys = [key["key"] for key in ckpt("inspect", whole, "--json").document["keys"]]
    assert said.code == 0
    assert all(f"\n{key} " in said.out for key in keys)
    assert "__0_0.distcp" in said.out


def test_validate_of_a_whole_checkpoint(ckpt: Ckpt, whole: Path) -> None:
    said = ckpt("validate", whole, "--json")
    assert said.code == 0
    assert set(said.document) == {"checkpoint", "state", "ok", "fingerprint", "findings", "stats"}
    assert (said.document["state"], said.document["ok"]) == ("committed", True)
    assert set(said.document["stats"]) == STATS
    assert len(said.document["fingerprint"]) == 64


def test_validate_of_a_torn_checkpoint(ckpt: Ckpt, whole: Path) -> None:
    os.truncate(whole / "__1_0.distcp", 100)
    said = ckpt("validate", whole, "--json", "--copied")
    assert said.code == 1
    assert (said.document["state"], said.document["ok"]) == ("torn", False)
    assert "files.truncated" in {found["code"] for found in said.document["findings"]}
    assert all(set(found) == FINDING for found in said.document["findings"])


def test_validate_tells_a_person_the_damage_and_the_next_step(ckpt: Ckpt, whole: Path) -> None:
    (whole / "__1_0.distcp").unlink()
    said = ckpt("validate", whole)
    assert said.code == 1
    assert "error files.missing" in said.out
    assert "__1_0.distcp" in said.out
    assert "→ " in said.out


@pytest.mark.parametrize(("age", "state"), [(10, "writing"), (3600, "incomplete")])
def test_validate_without_an_index(ckpt: Ckpt, whole: Path, age: float, state: str) -> None:
    (whole / ".metadata").unlink()
    now = whole.stat().st_mtime
    for path in whole.iterdir():
        os.utime(path, (now - age, now - age))
    said = ckpt("validate", whole, "--json")
    assert (said.code, said.document["state"], said.document["ok"]) == (1, state, False)


def test_validate_of_what_is_no_checkpoint(ckpt: Ckpt, golden: Callable[[str], Path]) -> None:
    said = ckpt("validate", golden("not_dcp_verl_fsdp"), "--json")
    assert (said.code, said.document["state"]) == (1, "not-dcp")


def test_contract_and_validate_against_it(
    ckpt: Ckpt, whole: Path, golden_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    written = ckpt("contract", whole)
    assert written.code == 0
    assert written.document["version"] == 1
    file = tmp_path / "contract.json"
    file.write_text(written.out)
    assert ckpt("validate", whole, "--contract", file).code == 0

    other = golden_copy("torch_tied")
    for expectation in (["--contract", file], ["--against", whole]):
        said = ckpt("validate", other, "--json", *expectation)
        assert said.code == 1
        assert "keys.missing" in {found["code"] for found in said.document["findings"]}


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
def test_every_golden_is_judged_without_a_traceback(ckpt: Ckpt, golden: Golden) -> None:
    for command in ("inspect", "validate"):
        said = ckpt(command, golden.directory, "--json")
        assert said.code in (0, 1)
        assert ("error" in said.document) == (command == "inspect" and said.code == 1)
        assert said.err == ""
        assert ckpt(command, golden.directory).code == said.code


def test_a_url_that_does_not_exist_is_no_finding(ckpt: Ckpt, tmp_path: Path) -> None:
    for command in ("inspect", "validate", "contract"):
        said = ckpt(command, tmp_path / "nowhere", "--json")
        assert said.code == 3
        error = said.document["error"]
        assert (error["class"], error["exit_code"]) == ("NotFoundError", 3)
        assert str(tmp_path / "nowhere") in error["message"]
        assert error["advice"]


def test_failures_for_people_are_a_line_and_advice(ckpt: Ckpt, tmp_path: Path) -> None:
    said = ckpt("validate", tmp_path / "nowhere")
    assert (said.code, said.out) == (3, "")
    line, advice = said.err.splitlines()
    assert line.startswith("error: ")
    assert str(tmp_path / "nowhere") in line
    assert advice.startswith("  ")


def test_an_error_in_the_checkpoint_carries_its_findings(ckpt: Ckpt, whole: Path) -> None:
    (whole / ".metadata").write_bytes(b"")
    error = ckpt("inspect", whole, "--json").document["error"]
    assert (error["class"], error["exit_code"]) == ("MetadataError", 1)
    assert [found["code"] for found in error["findings"]] == ["metadata.empty"]
    assert set(error["findings"][0]) == FINDING


@pytest.mark.parametrize(
    "arguments",
    [
        ["validate"],
        ["validate", "a", "b"],
        ["validate", "--no-such-option", "a"],
        ["nonsense"],
        ["inspect", "--keys"],
    ],
)
def test_wrong_usage(ckpt: Ckpt, arguments: list[str]) -> None:
    said = ckpt(*arguments)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("error: ")
    assert "--help" in said.err

    said = ckpt(*arguments, "--json")
    assert said.code == 2
    assert (said.document["error"]["class"], said.document["error"]["exit_code"]) == ("UsageError", 2)
    assert said.err == ""


def test_a_wrong_location_is_wrong_usage(ckpt: Ckpt) -> None:
    assert ckpt("validate", "nosuch://bucket/step").code == 2
    assert ckpt("validate", "").code == 2


def test_a_contract_that_is_none_is_wrong_usage(ckpt: Ckpt, whole: Path, tmp_path: Path) -> None:
    file = tmp_path / "contract.json"
    file.write_text('{"version": 7}')
    said = ckpt("validate", whole, "--contract", file)
    assert said.code == 2
    assert "version" in said.err


def test_ckpt_alone_shows_its_help(ckpt: Ckpt) -> None:
    said = ckpt()
    assert said.code == 2
    assert "Commands:" in said.err


def test_quiet_is_silent_unless_something_is_wrong(ckpt: Ckpt, whole: Path) -> None:
    for command in ("inspect", "validate"):
        said = ckpt(command, whole, "--quiet")
        assert (said.code, said.out, said.err) == (0, "", "")
    (whole / "__1_0.distcp").unlink()
    said = ckpt("validate", whole, "--quiet")
    assert (said.code, said.out) == (1, "")
    assert "files.missing" in said.err
    assert ckpt("validate", whole, "--quiet", "--json").document["ok"] is False


def test_hostile_names_are_inert_for_people(ckpt: Ckpt, hostile: Path) -> None:
    for command in ("inspect", "validate"):
        said = ckpt(command, hostile)
        assert said.code == 0
        assert all(char == "\n" or char.isprintable() for char in said.out + said.err)
    shown = ckpt("inspect", hostile).out
    assert "\\x1b[31mred\\x1b[0m" in shown
    assert "[bold red]markup[/bold red]" in shown
    assert ":boom:" in shown
    assert "half \\ud800 surrogate" in shown
    assert len(max(shown.splitlines(), key=len)) < 120


def test_hostile_names_are_exact_in_json(ckpt: Ckpt, hostile: Path) -> None:
    said = ckpt("inspect", hostile, "--json")
    assert said.out.isascii()
    assert {key["key"] for key in said.document["keys"]} == set(HOSTILE_KEYS)
    contract = json.loads(ckpt("contract", hostile).out)
    assert set(contract["keys"]) == set(HOSTILE_KEYS)


def test_hostile_names_in_findings_and_errors(ckpt: Ckpt, hostile: Path, whole: Path) -> None:
    said = ckpt("validate", whole, "--against", hostile)
    assert said.code == 1
    assert all(char == "\n" or char.isprintable() for char in said.out)
    assert ckpt("validate", whole, "--against", hostile, "--json").out.isascii()
    said = ckpt("validate", "/nowhere/\x1b[31m\u202e")
    assert said.code == 3
    assert all(char == "\n" or char.isprintable() for char in said.err)


def test_many_findings_are_folded_for_people_and_whole_in_json(
    ckpt: Ckpt, whole: Path, golden_copy: Callable[[str], Path]
) -> None:
    other = golden_copy("torch_tied")
    said = ckpt("validate", other, "--against", whole)
    findings = ckpt("validate", other, "--against", whole, "--json").document["findings"]
    missing = [found for found in findings if found["code"] == "keys.missing"]
    assert len(missing) > 20
    assert f"error keys.missing ({len(missing)})" in said.out
    assert f"… and {len(missing) - 5} more" in said.out
    assert sum(found["message"] in said.out for found in missing) < len(missing)
