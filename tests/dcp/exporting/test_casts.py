"""Casts give torch's bits, and exports with a cast equal torch's ``.to()``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemWriter, save

from dcp.errors import UsageError
from dcp.exporting import export, plan_export
from dcp.exporting.casts import cast, needs_torch
from tests.dcp.exporting.test_export import flat, same
from tests.support.train import SavedCheckpoint

TYPES = ("float16", "bfloat16", "float32", "float64")


def samples(dtype: str) -> torch.Tensor:
    """All elements of a two-byte type; of others values of every size, ties, NaNs, infinities."""
    kind = getattr(torch, dtype)
    if kind.itemsize == 2:
        return torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16)).view(kind)
    rng = np.random.default_rng(0)
    whole = {4: np.uint32, 8: np.uint64}[kind.itemsize]
    bits = rng.integers(0, np.iinfo(whole).max, 300_001, dtype=whole, endpoint=True)
    if dtype == "float32":
        upper = np.arange(1 << 16, dtype=np.uint32) << 16
        bits = np.concatenate([bits, *(upper + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF))])
    values = torch.from_numpy(bits.view({4: np.float32, 8: np.float64}[kind.itemsize]))
    near = torch.from_numpy(rng.standard_normal(100_000) * np.exp2(rng.integers(-40, 20, 100_000))).to(kind)
    # Which NaN torch writes for a float64 depends on where in the tensor it stands.
    return torch.cat([values[~values.isnan()] if dtype == "float64" else values, near])


@pytest.mark.parametrize("source", [*TYPES, "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("target", TYPES)
def test_bits_are_those_of_torch(source: str, target: str) -> None:
    if source.startswith("float8"):
        values = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(getattr(torch, source))
    else:
        values = samples(source)
    if source == target:
        return
    wanted = values.to(getattr(torch, target))
    data = memoryview(bytearray(values.view(torch.uint8).numpy().tobytes()))
    view, overflowed = cast(data, source, target)
    assert bytes(view) == wanted.view(torch.uint8).numpy().tobytes()
    finite = values.to(torch.float64).isfinite()
    assert overflowed == int((finite & wanted.to(torch.float64).isinf()).sum())
    assert (overflowed > 0) == (torch.finfo(values.dtype).max > torch.finfo(wanted.dtype).max)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_only_floating_tensors_are_cast(
    dtype: str, fsdp2_checkpoint: SavedCheckpoint, tmp_path: Path
) -> None:
    step = str(fsdp2_checkpoint.path)
    kind = getattr(torch, dtype)
    report = export(step, str(tmp_path / "out.pt"), dtype=dtype)
    halves = export(step, str(tmp_path / "out"), format="safetensors", dtype=dtype)
    assert report.dtype == dtype
    assert report.tensors["model.emb.weight"].cast_from == "float32"
    assert report.tensors["rng"].cast_from is None
    assert halves.tensors == report.tensors
    expected = {
        key: value.to(kind) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for key, value in fsdp2_checkpoint.expected().items()
    }
    found = dict(flat(torch.load(tmp_path / "out.pt", weights_only=True)))
    shards = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    for key, wanted in expected.items():
        if isinstance(wanted, torch.Tensor):
            assert same(shards[key], wanted), key
            assert same(found[key], wanted), key
    plan = plan_export(step, str(tmp_path / "out"), format="safetensors", dtype=dtype)
    assert plan.disk == sum(f.size for f in halves.files)
    assert plan.bytes > plan.disk


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_usual_casts_need_no_torch(dtype: str, golden: Callable[[str], Path], tmp_path: Path) -> None:
    assert not needs_torch("float32", dtype)
    code = (
        f"import sys, dcp; dcp.export(*sys.argv[1:], dtype='{dtype}')\n"
        "assert not {'torch', 'prefect'} & set(sys.modules)"
    )
    arguments = [str(golden("torch_tied")), str(tmp_path / "out.pt")]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=60)


@pytest.mark.parametrize("format", ["torch", "safetensors"])
def test_values_that_become_infinite_are_told(
    format: Literal["torch", "safetensors"], tmp_path: Path
) -> None:
    large = torch.full((600, 700), 65504.0)
    large[3, 4], large[599, 699], large[0, 0], large[0, 1] = 7e4, -1e30, float("inf"), float("nan")
    state = {"large": large, "small": torch.randn(9), "half": torch.tensor([65504.0]).half()}
    save(state, storage_writer=FileSystemWriter(tmp_path / "step"))
    step, out = str(tmp_path / "step"), str(tmp_path / "out")
    report = export(step, out, format=format, dtype="float16", rename=["^=>m."])
    assert report.ok
    [told] = report.findings
    assert (told.code, told.severity, told.key) == ("export.overflow", "warning", "large")
    assert told.message == ("large: 2 of 420,000 values were finite as float32 and are infinite as float16")
    assert told.detail == {"count": 2, "dtype": "float16", "cast_from": "float32"}
    assert {name: t.overflowed for name, t in report.tensors.items() if t.overflowed} == {"m.large": 2}
    assert not export(step, out, format=format, dtype="bfloat16").findings


def test_other_types_are_refused(golden: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="int8"):
        export(str(golden("torch_tied")), str(tmp_path / "out.pt"), dtype="int8")  # type: ignore[arg-type]
