"""`ckpt import`, as people and programs use it."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.flows.cli.ckpt import Ckpt


def test_import_validate_and_back(ckpt: Ckpt, tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(30.0).reshape(10, 3)}, "step": 7, "empty": {}}
    torch.save(state, tmp_path / "in.pt")
    step = tmp_path / "step"
    said = ckpt("import", tmp_path / "in.pt", step, "--ranks", "4")
    assert (said.code, said.err) == (0, "")
    assert "2, 1 tensor among them" in said.out
    assert "left out, being empty: empty" in said.out
    assert ckpt("validate", step, "--scrub").code == 0
    assert ckpt("test-load", step, "--layout", "fsdp=3").code == 0
    assert ckpt("export", step, tmp_path / "out.pt").code == 0
    back = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(back["model"]["w"], state["model"]["w"])
    assert back["step"] == 7


def test_exit_codes(ckpt: Ckpt, tmp_path: Path) -> None:
    file, step = tmp_path / "in.pt", tmp_path / "step"
    torch.save({"o": Path, "w": torch.ones(2), "u": Odd()}, file)
    said = ckpt("import", file, step, "--json")
    assert said.code == 1
    assert "--allow-pickle" in str(said.document)
    assert ckpt("import", file, step, "--ranks", "0").code == 2
    assert ckpt("import", tmp_path / "absent.pt", step).code == 3
    done = ckpt("import", file, step, "--allow-pickle", "--json")
    assert (done.code, done.document["ok"], done.document["keys"]) == (0, True, 3)
    again = ckpt("import", file, step, "--allow-pickle")
    assert again.code == 2
    assert "--overwrite" in again.err
    assert ckpt("import", file, step, "--allow-pickle", "--overwrite").code == 0


def test_tensors_that_stay_whole(ckpt: Ckpt, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4), "buffer": torch.ones(4)}, tmp_path / "in.pt")
    options = ("--ranks", "2", "--json", "--whole")
    done = ckpt("import", tmp_path / "in.pt", tmp_path / "step", *options, "buf*")
    assert (done.code, done.document["chunks"]) == (0, 3)
    assert ckpt("import", tmp_path / "in.pt", tmp_path / "other", *options, "none").code == 2


class Odd:
    """A class that no list knows."""
