"""`ckpt diff`, `ckpt contract` and `ckpt validate --scrub`, as people and programs use them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.flows.cli.ckpt import Ckpt
from tests.support.golden import SAVED_AT

Find = Callable[[str], Path]


def flip_a_bit(step: Path) -> str:
    """Damage one element; the key it belongs to."""
    import dcp

    entry = next(e for e in dcp.read_index(str(step)).tensors if e.key == "model.a.weight")
    record = entry.chunks.records[0]
    assert record is not None
    file = step / record.path
    data = bytearray(file.read_bytes())
    data[record.offset + 704] ^= 1
    file.write_bytes(data)
    os.utime(file, (SAVED_AT, SAVED_AT))
    return entry.key


def test_scrub_finds_what_validate_alone_does_not(ckpt: Ckpt, golden_copy: Find) -> None:
    step = golden_copy("torch_fsdp_tp_2x2")
    assert ckpt("validate", step, "--scrub").code == 0
    key = flip_a_bit(step)
    assert ckpt("validate", step).code == 0
    said = ckpt("validate", step, "--scrub", "--json")
    assert said.code == 1
    (found,) = said.document["findings"]
    assert (found["code"], found["key"]) == ("records.corrupt", key)
    assert key not in said.document["tensors"]
    assert set(ckpt("validate", step, "--json").document) == {
        "checkpoint", "state", "ok", "fingerprint", "findings", "stats",
    }  # fmt: skip
    human = ckpt("validate", step, "--scrub")
    assert "records.corrupt" in human.out
    assert key in human.out


def test_allowed_classes_and_ignored_keys(ckpt: Ckpt, golden: Find) -> None:
    objects = golden("torch_objects")
    assert "records.unsafe" in ckpt("validate", objects, "--scrub", "--copied").out
    allowed = ("--allow", "__main__.*", "--allow", "functools.partial")
    assert "records.unsafe" not in ckpt("validate", objects, "--scrub", "--copied", *allowed).out
    tied, keys = golden("torch_tied"), golden("torch_keys")
    assert ckpt("validate", tied, "--copied", "--against", keys).code == 1
    assert ckpt("validate", tied, "--copied", "--against", keys, "--ignore", "*").code == 0
    assert ckpt("validate", tied, "--allow", "nonsense").code == 2


def test_diff(ckpt: Ckpt, golden: Find, golden_copy: Find) -> None:
    same = ckpt(
        "diff", golden("torch_fsdp2_zstd"), golden("torch_fsdp2_file_per_tensor"), "--values", "--json"
    )
    assert (same.code, same.document["same"], same.document["values"]) == (0, True, [])
    other = ckpt("diff", golden("torch_tied"), golden("torch_keys"))
    assert other.code == 1
    assert "only in b" in other.out
    damaged = golden_copy("torch_fsdp_tp_2x2")
    key = flip_a_bit(damaged)
    said = ckpt("diff", golden("torch_fsdp_tp_2x2"), damaged, "--values")
    assert said.code == 1
    assert "records.corrupt" in said.out
    assert key in said.out
    assert ckpt("diff", golden("torch_tied"), golden("not_dcp_verl_fsdp")).code == 1


def test_contract_from_a_step_of_parts_and_from_a_model(
    ckpt: Ckpt, golden: Find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = ckpt("contract", golden("accelerate_fsdp2")).document
    assert any(key.startswith("optimizer_0/") for key in parts["keys"])
    (tmp_path / "contract.json").write_text(ckpt("contract", golden("accelerate_fsdp2")).out)
    said = ckpt("validate", golden("accelerate_fsdp2"), "--copied", "--contract", tmp_path / "contract.json")
    assert said.code == 0
    (tmp_path / "tiny_model.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(2, 3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    keys = ckpt("contract", "--model", "tiny_model:build").document["keys"]
    assert keys["model.weight"] == {"kind": "tensor", "shape": [3, 2], "dtype": "float32"}
    assert ckpt("contract").code == 2
    assert ckpt("contract", "--model", "tiny_model:nothing").code == 2
    assert ckpt("contract", golden("torch_tied"), "--model", "tiny_model:build").code == 2
