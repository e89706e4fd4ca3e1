"""The plan is what the export does: files, places, reads, memory; and what does not fit is said before."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.errors import UsageError
from dcp.exporting import export, machine, plan_export
from dcp.safetensors_file import read_header
from dcp.sizes import human_bytes
from dcp.storage import open_store
from tests.dcp.exporting.test_export import EXPORTABLE
from tests.support.golden import Golden

REQUESTS: list[dict[str, Any]] = [
    {},
    {"include": ["*weight*"], "rename": ["weight=>w"]},
    {"dtype": "bfloat16"},
    {"tie": True},
    {"max_shard_size": 3000},
    {"include": ["*.weight"], "tie": True, "dtype": "float64", "allow_pickle": True},
]

SEVERAL = {"torch_fsdp_tp_2x2", "composer_sharded", "torch_fsdp2_zstd", "torch_tied", "torch_exotic_2rank"}


def possible(golden: Golden, options: dict[str, Any], dest: str, **more: Any) -> Any:
    """The plan, or None for a request that makes no sense for this golden."""
    try:
        return plan_export(str(golden.directory), dest, **options, **more)
    except UsageError:
        return None


@pytest.mark.parametrize("format", ["torch", "safetensors"])
@pytest.mark.parametrize(
    "golden", [g for g in EXPORTABLE if g.name in SEVERAL], ids=lambda golden: golden.name
)
def test_files_are_those_that_are_written(golden: Golden, format: str, tmp_path: Path) -> None:
    exact = 0
    for number, options in enumerate(REQUESTS):
        dest = str(tmp_path / f"out{number}")
        plan = possible(golden, options, dest, format=format)
        if plan is None:
            continue
        report = export(str(golden.directory), dest, format=format, **options)  # type: ignore[arg-type]
        for planned, written in zip(plan.files, report.files, strict=True) if not options.get("tie") else ():
            assert planned.name == written.name
            exact += planned.exact
            assert planned.bytes == written.size if planned.exact else planned.bytes > 0.7 * written.size
        assert plan.disk == sum(file.bytes for file in plan.files)
        assert plan.disk >= 0.9 * report.bytes_written
        assert plan.bytes >= 0.9 * report.bytes_read
        assert plan.tensors >= len(report.tensors)
        assert not plan.refusals
    assert exact or format == "torch"


def tensors_at(path: Path) -> Iterator[tuple[str, int, bytes]]:
    """Name, offset and content of each tensor of a file, by other readers than the plan's."""
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        store = open_store(str(path.parent))
        for name, stored in read_header(store, store.info(path.name))[0].items():
            yield name, stored.start, data[stored.start : stored.end]
        return
    loaded = torch.load(path, weights_only=True)
    for name, tensor in loaded.items():
        raw = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""
        yield name, data.find(raw), raw


@pytest.mark.parametrize("name", ["out.pt", "out.safetensors"])
def test_offsets_are_where_tensors_stand(name: str, golden: Callable[[str], Path], tmp_path: Path) -> None:
    step, out = str(golden("torch_fsdp_tp_2x2")), tmp_path / name
    options: dict[str, Any] = {
        "format": "torch" if name.endswith(".pt") else "safetensors",
        "include": ["model.*"],
        "strip_prefix": "model.",
    }
    [planned] = plan_export(step, str(out), detail=True, **options).files
    export(step, str(out), **options)
    data = out.read_bytes()
    index = dcp.read_index(step)
    assert planned.exact
    assert planned.bytes == len(data)
    found = {tensor.name: tensor for tensor in planned.tensors}
    for key, _, raw in tensors_at(out):
        offset = found[key].offset
        assert offset is not None
        assert data[offset : offset + found[key].bytes] == raw
        entry = index.entries[f"model.{key}"]
        assert [(r.file, r.offset, r.length) for r in found[key].reads] == [
            (r.path, r.offset, r.length)
            for r in entry.chunks.records  # type: ignore[union-attr]
            if r is not None
        ]


def test_every_option_changes_the_plan(golden: Callable[[str], Path], tmp_path: Path) -> None:
    step, out = str(golden("torch_tied")), str(tmp_path / "out.pt")
    plain = plan_export(step, out)
    assert plan_export(step, out, include=["*.weight"]).keys < plain.keys
    assert plan_export(step, out, dtype="float64").disk > plain.disk
    tied = plan_export(step, out, tie=True)
    assert tied.memory > plain.memory or tied.bytes > plain.bytes
    assert tied.files[0].exact is False
    assert plan_export(step, out, memory_budget=200 << 20).memory <= 200 << 20
    assert plan_export(step, out, rate=1000.0).seconds == round(1 + plain.bytes / 1000, 1)
    assert plan_export(step, out, rate=1000.0).rate_measured
    with pytest.raises(UsageError):
        plan_export(step, out, rename=[r"a=>\9"])


def test_reads_nothing_but_the_index(golden_copy: Callable[[str], Path], tmp_path: Path) -> None:
    step = golden_copy("torch_fsdp_tp_2x2")
    for file in step.glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    assert plan_export(str(step), str(tmp_path / "out.pt"), tie=True, detail=True).tensors == 30
    code = (
        "import sys, dcp; dcp.plan_export(*sys.argv[1:]); assert not {'torch', 'prefect'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(step), str(tmp_path / "x.pt")], check=True, timeout=60)


def test_what_the_machine_lacks_is_in_the_plan(
    golden: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, out = str(golden("torch_fsdp_tp_2x2")), str(tmp_path / "out.pt")
    monkeypatch.setattr(machine, "disk_left", lambda _: 7)
    monkeypatch.setattr(machine, "memory_used", lambda: 0)
    monkeypatch.setattr(machine, "memory_left", lambda: 9)
    plan = plan_export(step, out)
    assert [
        f"{human_bytes(plan.memory)} of memory are needed and 9 B can be had; "
        "lower --memory-budget, or take a larger machine",
        f"{out} needs {human_bytes(plan.disk)} of disk and 7 B are free; free some, or write elsewhere",
    ] == plan.refusals
    assert json.loads(plan.model_dump_json())["refusals"] == plan.refusals
