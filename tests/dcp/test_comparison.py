"""`diff`: what differs is found whatever the chunking, and what is the same is called so."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from tests.support.train import SavedCheckpoint, make_checkpoint


def save(directory: Path, state: dict[str, Any]) -> str:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_state

    save_state(state, storage_writer=FileSystemWriter(directory), no_dist=True)
    return str(directory)


def test_the_same_values_in_other_chunks_are_the_same(
    fsdp2_checkpoint: SavedCheckpoint, tmp_path: Path
) -> None:
    four = make_checkpoint(tmp_path / "four", ranks=1)
    whole = save(tmp_path / "whole", fsdp2_checkpoint.expected())
    report = dcp.diff(str(fsdp2_checkpoint.path), whole, values=True)
    tensors = [k for k, v in fsdp2_checkpoint.expected().items() if isinstance(v, torch.Tensor)]
    assert report.same
    assert report.chunking
    assert report.values == []
    assert report.compared >= len(tensors)
    keys = dcp.diff(str(fsdp2_checkpoint.path), str(four.path))
    assert keys.same
    assert keys.values is None


def test_a_step_later_every_weight_differs(tmp_path: Path) -> None:
    steps = [make_checkpoint(tmp_path / f"step_{n}", steps=n) for n in (1, 2)]
    report = dcp.diff(*[str(step.path) for step in steps], values=True)
    assert not report.same
    assert report.only_a == report.only_b == report.changed == []
    found = {change.key: change for change in report.values or ()}
    a, b = (step.expected() for step in steps)
    for key, left in a.items():
        if not isinstance(left, torch.Tensor):
            continue
        right = b[key]
        assert (key in found) == (not torch.equal(left, right)), key
        if key in found and left.is_floating_point():
            assert found[key].different == int((left != right).sum())
            assert found[key].largest == pytest.approx(float((left.double() - right.double()).abs().max()))
            assert found[key].norm == pytest.approx((float(left.norm()), float(right.norm())), rel=1e-4)


def test_bytes_that_differ_under_one_checksum_are_told(tmp_path: Path) -> None:
    # Four more bytes lead to any CRC-32 from any other.
    first, second = (1).to_bytes(4, "little"), (2).to_bytes(4, "little")
    forged = 7 ^ zlib.crc32(first) ^ zlib.crc32(second)
    values = [torch.frombuffer(bytearray(first + (7).to_bytes(4, "little")), dtype=torch.uint8)]
    values.append(torch.frombuffer(bytearray(second + forged.to_bytes(4, "little")), dtype=torch.uint8))
    assert zlib.crc32(bytes(values[0].tolist())) == zlib.crc32(bytes(values[1].tolist()))
    a, b = (save(tmp_path / str(number), {"w": value}) for number, value in enumerate(values))
    report = dcp.diff(a, b, values=True)
    assert report.values is not None
    assert [(change.key, change.different) for change in report.values] == [
        ("w", int((values[0] != values[1]).sum()))
    ]


def test_keys_shapes_types_and_kinds(tmp_path: Path) -> None:
    a = save(
        tmp_path / "a", {"x": torch.zeros(2, 3), "y": torch.zeros(2), "k": torch.zeros(1), "a": 1, "s": 1}
    )
    b = save(tmp_path / "b", {"x": torch.zeros(3, 3), "y": torch.zeros(2).half(), "k": 1, "b": 1, "s": 2})
    report = dcp.diff(a, b, values=True)
    assert (report.only_a, report.only_b) == (["a"], ["b"])
    changed = {change.key: change for change in report.changed}
    assert changed["x"].shape == ([2, 3], [3, 3])
    assert changed["y"].dtype == ("float32", "float16")
    assert changed["k"].kind == ("tensor", "bytes")
    assert [change.key for change in report.values or ()] == ["s"]
    assert not report.same


def test_nan_infinity_and_every_type(tmp_path: Path) -> None:
    nan = float("nan")
    state = {
        "same_nan": torch.tensor([nan, 1.0]),
        "nan": torch.tensor([1.0, 2.0]),
        "bf16": torch.arange(3).bfloat16(),
        "int": torch.arange(3),
        "bool": torch.tensor([True, False]),
        "f8": torch.ones(3).to(torch.float8_e4m3fn),
        "complex": torch.tensor([1 + 1j, 2]),
        "scalar": torch.tensor(1.0),
        "empty": torch.zeros(0, 3),
    }
    other = {
        **state,
        "nan": torch.tensor([1.0, nan]),
        "bf16": torch.tensor([0, 1, 5]).bfloat16(),
        "int": torch.tensor([0, 1, 7]),
        "f8": torch.zeros(3).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3.0),
    }
    report = dcp.diff(save(tmp_path / "a", state), save(tmp_path / "b", other), values=True)
    found = {change.key: change for change in report.values or ()}
    assert set(found) == {"nan", "bf16", "int", "f8", "scalar"}
    assert found["nan"].largest == float("inf")
    assert (found["bf16"].different, found["bf16"].largest) == (1, 3.0)
    assert (found["int"].different, found["int"].largest) == (1, None)
    assert found["scalar"].largest == 2.0


def test_goldens_are_the_same_as_themselves(golden: Callable[[str], Path]) -> None:
    for name in ("torch_fsdp2_zstd", "torch_exotic_2rank", "megatron_torch_dist_plain", "torch_objects"):
        assert dcp.diff(str(golden(name)), str(golden(name)), values=True).same
    twice = dcp.diff(str(golden("torch_fsdp2_zstd")), str(golden("torch_fsdp2_file_per_tensor")), values=True)
    assert twice.same, "the same training, written in two formats"


def test_damage_is_told_and_is_never_the_same(
    golden_copy: Callable[[str], Path], golden: Callable[[str], Path]
) -> None:
    step = golden_copy("torch_fsdp_tp_2x2")
    entry = next(e for e in dcp.read_index(str(step)).tensors if len(e.chunks) == 4)
    record = entry.chunks.records[1]
    assert record is not None
    data = bytearray((step / record.path).read_bytes())
    data[record.offset + 704] ^= 1
    (step / record.path).write_bytes(data)
    os.utime(step / record.path, (1, 1))
    report = dcp.diff(str(step), str(golden("torch_fsdp_tp_2x2")), values=True)
    assert not report.same
    assert {(f.code, f.key) for f in report.findings} == {("records.corrupt", entry.key)}


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_are_compared_by_their_records(tmp_path: Path) -> None:
    def quantized(scale: float) -> dict[str, Any]:
        return {"q": torch.quantize_per_tensor(torch.arange(40.0).reshape(10, 4), scale, 0, torch.qint8)}

    a, b, other = (save(tmp_path / name, quantized(s)) for name, s in (("a", 0.5), ("b", 0.5), ("c", 0.25)))
    report = dcp.diff(a, b, values=True)
    assert report.same
    assert report.compared == 1
    report = dcp.diff(a, other, values=True)
    assert not report.same
    assert [change.key for change in report.values or ()] == ["q"]
