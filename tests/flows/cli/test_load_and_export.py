"""`ckpt test-load` and `ckpt export`: contracts of their JSON, exit codes, and what they leave behind."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.flows.cli.ckpt import Ckpt
from tests.support.train import SavedCheckpoint

LAYOUT = {"layout", "ranks", "ok", "bytes_needed", "bytes_read", "seconds", "findings"}


def test_test_load_takes_two_and_three_ranks_by_default(ckpt: Ckpt, whole: Path) -> None:
    said = ckpt("test-load", whole, "--json")
    assert (said.code, said.document["ok"], said.err) == (0, True, "")
    assert [(each["layout"], each["ranks"]) for each in said.document["layouts"]] == [
        ("fsdp=2", 2),
        ("fsdp=3", 3),
    ]
    for each in said.document["layouts"]:
        assert set(each) >= LAYOUT
        assert each["ok"]
        assert each["bytes_needed"] > 0
        assert each["findings"] == []


def test_test_load_takes_the_layouts_asked_for(ckpt: Ckpt, whole: Path) -> None:
    said = ckpt("test-load", whole, "--json", "--layout", "fsdp=5", "--layout", "fsdp=2,tp=2")
    assert [(each["layout"], each["ranks"]) for each in said.document["layouts"]] == [
        ("fsdp=5", 5),
        ("fsdp=2,tp=2", 4),
    ]


def test_test_load_with_real_ranks_agrees(ckpt: Ckpt, whole: Path) -> None:
    documents = [
        ckpt("test-load", whole, "--json", "--layout", "fsdp=2", "--engine", engine).document
        for engine in ("simulated", "gloo")
    ]
    assert [document["engine"] for document in documents] == ["simulated", "gloo"]
    for key in ("layout", "ranks", "ok", "bytes_needed", "tensors", "objects"):
        simulated, gloo = (document["layouts"][0][key] for document in documents)
        assert simulated == gloo, key
    assert ckpt("test-load", whole, "--engine", "mpi").code == 2


def test_test_load_can_be_planned(ckpt: Ckpt, whole: Path) -> None:
    said = ckpt("test-load", whole, "--plan", "--json")
    assert (said.code, said.err) == (0, "")
    assert [each["ranks"] for each in said.document["layouts"]] == [2**power for power in range(11)]
    [one] = ckpt("test-load", whole, "--plan", "--json", "--layout", "fsdp=2").document["layouts"]
    assert one == said.document["layouts"][1]
    for reader in ("bucket_reader", "torch_reader"):
        assert set(one[reader]) >= {"bytes", "requests", "amplification", "slowest_rank"}
    shown = ckpt("test-load", whole, "--plan")
    assert shown.code == 0
    assert "fsdp=1024" in shown.out
    os.truncate(whole / "__1_0.distcp", 2000)
    assert ckpt("test-load", whole, "--plan").code == 1


def test_test_load_takes_tp_rules(ckpt: Ckpt, whole: Path, tmp_path: Path) -> None:
    rules = tmp_path / "tp.toml"
    rules.write_text('"*.a.*" = "column"\n"*.head.*" = "row"\n"*.nowhere" = 0\n')
    options = ["--layout", "fsdp=2,tp=2", "--tp-rules", str(rules)]
    done = ckpt("test-load", whole, *options, "--json")
    assert (done.code, done.document["ok"], done.document["tp_rules_idle"]) == (0, True, ["*.nowhere"])
    assert "unused tp rules" in ckpt("test-load", whole, *options).out
    assert ckpt("test-load", whole, *options, "--plan").code == 0
    wrong = ckpt("test-load", whole, "--layout", "fsdp=2", "--tp-rules", str(rules))
    assert (wrong.code, "no layout has a tp axis" in wrong.err) == (2, True)
    rules.write_text('"*.a.*" = "colum"\n')
    wrong = ckpt("test-load", whole, *options)
    assert (wrong.code, "'colum' is no rule" in wrong.err) == (2, True)


def test_test_load_of_a_step_of_parts(ckpt: Ckpt, golden: Callable[[str], Path]) -> None:
    done = ckpt("test-load", golden("accelerate_fsdp2"), "--layout", "fsdp=3", "--json")
    assert done.code == 0
    parts = [(each["part"], each["layout"], each["ok"]) for each in done.document["layouts"]]
    assert parts == [("optimizer_0", "fsdp=3", True), ("pytorch_model_fsdp_0", "fsdp=3", True)]
    assert "PART" in ckpt("test-load", golden("accelerate_fsdp2"), "--layout", "fsdp=3").out


def test_test_load_of_a_damaged_checkpoint(ckpt: Ckpt, whole: Path) -> None:
    os.truncate(whole / "__1_0.distcp", 2000)
    said = ckpt("test-load", whole, "--json")
    assert said.code == 1
    if "error" in said.document:
        assert said.document["error"]["findings"]
    else:
        assert not said.document["ok"]
        assert any(each["findings"] for each in said.document["layouts"])
    assert ckpt("test-load", whole).code == 1


@pytest.mark.parametrize(
    "options", [["--layout", "fsdp=0"], ["--layout", "nonsense"], ["--memory-budget", "lots"]]
)
def test_wrong_layouts_and_sizes_are_wrong_usage(ckpt: Ckpt, whole: Path, options: list[str]) -> None:
    said = ckpt("test-load", whole, "--json", *options)
    assert (said.code, said.document["error"]["exit_code"]) == (2, 2)


def test_export_writes_what_torch_loads(
    ckpt: Ckpt, fsdp2_checkpoint: SavedCheckpoint, tmp_path: Path
) -> None:
    file = tmp_path / "out.pt"
    said = ckpt("export", fsdp2_checkpoint.path, file, "--json")
    assert (said.code, said.err) == (0, "")
    [written] = said.document["files"]
    assert (written["name"], written["size"]) == ("out.pt", file.stat().st_size)
    expected = fsdp2_checkpoint.expected()
    loaded = torch.load(file, weights_only=True)
    weight = "model.layers.0.w1.weight"
    assert torch.equal(loaded["model"]["layers.0.w1.weight"], expected[weight])
    assert set(said.document["tensors"]) == {k for k, v in expected.items() if isinstance(v, torch.Tensor)}
    assert said.document["tensors"][weight]["shape"] == list(expected[weight].shape)


def test_keys_that_are_not_there_are_answered_with_the_command_that_lists_them(
    ckpt: Ckpt, whole: Path, tmp_path: Path
) -> None:
    said = ckpt("export", whole, tmp_path / "out.pt", "--include", "modle.*")
    assert said.code == 2
    assert f"see them with: ckpt inspect {whole}\n" in said.err


def test_sha256_is_told_where_it_is_asked_for(ckpt: Ckpt, whole: Path, tmp_path: Path) -> None:
    [plain] = ckpt("export", whole, tmp_path / "a.pt", "--json").document["files"]
    assert (plain["sha256"], len(plain["crc32c"])) == (None, 8)
    digest = hashlib.sha256((tmp_path / "a.pt").read_bytes()).hexdigest()
    said = ckpt("export", whole, tmp_path / "a.pt", "--sha256")
    assert digest in said.out
    assert plain["crc32c"] in said.out


def test_export_selects_and_renames(ckpt: Ckpt, fsdp2_checkpoint: SavedCheckpoint, tmp_path: Path) -> None:
    file = tmp_path / "out.pt"
    said = ckpt(
        *("export", fsdp2_checkpoint.path, file, "--include", "model.*", "--exclude", "*.norm.*"),
        *("--strip-prefix", "model.", "--rename", "^layers=>blocks"),
    )
    assert said.code == 0, said.err
    names = set(torch.load(file, weights_only=True))
    assert "blocks.0.w1.weight" in names
    assert not any("norm" in name or name.startswith("model") for name in names)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_plan_writes_nothing(ckpt: Ckpt, whole: Path, tmp_path: Path, options: list[str]) -> None:
    file = tmp_path / "out" / "plan.pt"
    said = ckpt("export", whole, file, "--plan", *options)
    assert said.code == 0
    assert not file.parent.exists()
    if options:
        assert {"memory", "disk", "bytes", "seconds", "files"} <= set(said.document)
    else:
        assert "memory" in said.out


def test_a_damaged_checkpoint_is_not_exported(ckpt: Ckpt, whole: Path, tmp_path: Path) -> None:
    os.truncate(whole / "__1_0.distcp", 2000)
    file = tmp_path / "out.pt"
    said = ckpt("export", whole, file, "--json")
    assert said.code == 1
    assert "files.truncated" in {found["code"] for found in said.document["error"]["findings"]}
    assert not file.exists()
    assert "files.truncated" in ckpt("export", whole, file).err


@pytest.mark.parametrize(
    "options", [["--rename", "no arrow"], ["--include", "nothing.*"], ["--memory-budget", "0"]]
)
def test_exports_that_make_no_sense(ckpt: Ckpt, whole: Path, tmp_path: Path, options: list[str]) -> None:
    assert ckpt("export", whole, tmp_path / "out.pt", *options).code == 2
    assert not (tmp_path / "out.pt").exists()


def test_a_budget_that_cannot_be_kept_is_the_machines_fault(ckpt: Ckpt, whole: Path, tmp_path: Path) -> None:
    said = ckpt("export", whole, tmp_path / "out.pt", "--memory-budget", "1MiB", "--json")
    assert (said.code, said.document["error"]["class"]) == (3, "ResourceError")
