"""Tied tensors: found by content, whatever the chunks; stored once; equal by chance is not tied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dcp.checkpoint import open_checkpoint
from dcp.exporting import certify, export
from dcp.exporting.ties import ties
from tests.dcp.exporting.test_export import same


@pytest.fixture
def step(tmp_path: Path) -> tuple[str, dict[str, Any]]:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    torch.manual_seed(0)
    weight = torch.randn(300, 100)
    late = weight.clone()
    late[-1, -1] += 1
    value = {
        "emb": weight,
        "head": weight.clone(),
        "late": late,
        "half": weight.half(),
        "flat": weight.reshape(-1).clone(),
        "zero.a": torch.zeros(300, 100),
        "zero.b": torch.zeros(300, 100),
        "step.a": torch.tensor(3.0),
        "step.b": torch.tensor(3.0),
        "edge.a": torch.zeros(300, 100).index_put((torch.tensor(299), torch.tensor(99)), torch.tensor(1.0)),
        "edge.b": torch.zeros(300, 100).index_put((torch.tensor(299), torch.tensor(99)), torch.tensor(1.0)),
        "n": 1,
    }
    save(value, storage_writer=FileSystemWriter(tmp_path / "c"), no_dist=True)
    return str(tmp_path / "c"), value


@pytest.mark.parametrize("band", [1000, 1 << 20])
def test_what_is_equal_and_not_by_chance(step: tuple[str, dict[str, Any]], band: int) -> None:
    checkpoint = open_checkpoint(step[0])
    entries = sorted(checkpoint.index.tensors, key=lambda entry: entry.key)
    found = ties(checkpoint, entries, band_bytes=band, threads=2)
    assert found == {"head": "emb", "edge.b": "edge.a"}


def test_one_storage_in_a_torch_file(step: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    url, value = step
    out = tmp_path / "out.pt"
    report = export(url, str(out), tie=True, rename=["^head$=>lm_head"])
    assert report.tied == {"lm_head": "emb", "edge.b": "edge.a"}
    found = torch.load(out, weights_only=True)
    assert found["lm_head"].data_ptr() == found["emb"].data_ptr()
    assert found["zero.a"].data_ptr() != found["zero.b"].data_ptr()
    assert all(same(found["lm_head" if key == "head" else key], wanted) for key, wanted in value.items())
    assert certify(str(out)) == report.tensors
    assert out.stat().st_size < sum(t.nbytes for t in value.values() if isinstance(t, torch.Tensor)) - 200_000


@pytest.mark.parametrize("format", ["torch", "safetensors"])
def test_what_only_a_cast_makes_equal_stays_apart(
    step: tuple[str, dict[str, Any]], tmp_path: Path, format: Any
) -> None:
    """A weight and its copy of another type, as an optimizer keeps it, are not one tensor."""
    url, value = step
    dest = tmp_path / ("out.pt" if format == "torch" else "out.safetensors")
    report = export(url, str(dest), format=format, tie=True, dtype="float16")
    assert "half" not in {*report.tied, *report.tied.values()}
    found = torch.load(dest, weights_only=True) if format == "torch" else load_file(dest)
    assert torch.equal(found["half"], found["emb"])
    assert torch.equal(found["half"], value["half"])
    assert found["half"].data_ptr() != found["emb"].data_ptr()


def test_the_first_alone_in_safetensors(step: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    url, value = step
    report = export(url, str(tmp_path / "x.safetensors"), format="safetensors", tie=True, dtype="bfloat16")
    found = load_file(tmp_path / "x.safetensors")
    assert not set(report.tied) & set(found)
    assert {*report.tied, "n"} | set(found) == set(value)
    recorded = {f.key: f.detail["tied_to"] for f in report.findings if "tied_to" in f.detail}
    assert recorded == report.tied
    assert certify(str(tmp_path / "x.safetensors")).keys() == report.tensors.keys()


def test_a_golden_with_tied_weights(golden: Callable[[str], Path], tmp_path: Path) -> None:
    report = export(str(golden("torch_tied")), str(tmp_path / "out.pt"), tie=True)
    assert report.tied
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    expected = torch.load(golden("torch_tied").with_suffix(".expected.pt"), weights_only=False)
    for key, wanted in expected.items():
        place: Any = found
        for part in open_checkpoint(str(golden("torch_tied"))).index.path_of(key):
            place = place[part]
        assert same(place, wanted)


def test_decoded_chunks(golden: Callable[[str], Path], tmp_path: Path) -> None:
    plain = export(str(golden("torch_fsdp2_zstd")), str(tmp_path / "plain.pt"))
    report = export(str(golden("torch_fsdp2_zstd")), str(tmp_path / "out.pt"), tie=True)
    assert {key: t.digest for key, t in report.tensors.items()} == {
        key: t.digest for key, t in plain.tensors.items()
    }
