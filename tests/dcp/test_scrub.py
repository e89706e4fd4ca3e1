"""Scrub: whole checkpoints pass, every kind of damage to a record is found, digests ignore the chunking."""

from __future__ import annotations

import io
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import dcp
from dcp.boxes import Box
from dcp.checks.values import MEASURED, Health, measure
from dcp.errors import MetadataError
from dcp.index import Chunk, TensorEntry
from tests.dcp.test_records import content
from tests.support.golden import GOLDENS, SAVED_AT, Golden
from tests.support.train import SavedCheckpoint, make_checkpoint

ODD = {
    "torch_torchao": {"records.unchecked": "warning"},
    "torch_exotic_2rank": {"values.nonfinite": "warning"},
    "torch_objects": {"records.unsafe": "warning"},
    "torch_fsdp2_rank_local": {"metadata.unsupported": "warning"},
    "torch_serialization_safetensors": {"records.unchecked": "info"},
}
DCP = [golden for golden in GOLDENS if golden.name not in ("not_dcp_verl_fsdp", "torch_hf_sharded")]


@pytest.mark.parametrize("golden", DCP, ids=lambda golden: golden.name)
def test_goldens(golden: Golden) -> None:
    report = dcp.validate(str(golden.directory), scrub=True, copied=True)
    found = {f.code: f.severity for f in report.findings if f.code != "files.newer-than-metadata"}
    assert found == ODD.get(golden.name, {})
    assert report.ok == ("error" not in found.values())
    assert report.tensors is not None
    assert len(report.tensors) == report.stats.tensors - (2 if golden.name == "torch_torchao" else 0)


def test_digests_do_not_depend_on_the_chunking(fsdp2_checkpoint: SavedCheckpoint, tmp_path: Path) -> None:
    """The same values saved by one rank and by two, and exported, have the same digests."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    two = dcp.validate(str(fsdp2_checkpoint.path), scrub=True).tensors
    whole = {k: v for k, v in fsdp2_checkpoint.expected().items() if isinstance(v, torch.Tensor)}
    save(whole, storage_writer=FileSystemWriter(tmp_path / "one"), no_dist=True)
    one = dcp.validate(str(tmp_path / "one"), scrub=True).tensors
    exported = dcp.export(str(fsdp2_checkpoint.path), str(tmp_path / "out.pt")).tensors
    assert two is not None
    assert one == {k: two[k] for k in one or ()}
    assert {k: v.digest for k, v in exported.items()} == {k: v.digest for k, v in two.items()}
    other = make_checkpoint(tmp_path / "other", seed=1)
    changed = dcp.validate(str(other.path), scrub=True).tensors
    assert changed is not None
    key = next(k for k in two if k.startswith("model.") and k.endswith("weight"))
    assert changed[key].digest != two[key].digest


def test_every_damaged_record_is_reported_and_the_rest_goes_on(golden_copy: Callable[[str], Path]) -> None:
    step = golden_copy("torch_fsdp_tp_2x2")
    index = dcp.read_index(str(step))
    victims = [e for e in index.tensors if len(e.chunks) == 4][:3]
    for entry in victims:
        for chunk in list(entry.chunks)[:2]:
            assert chunk.record is not None
            flip(step / chunk.record.path, chunk.record.offset + 705)
    report = dcp.validate(str(step), scrub=True)
    assert not report.ok
    found = {(f.key, tuple(f.detail["offsets"])) for f in report.findings if f.code == "records.corrupt"}
    assert found == {(e.key, c.box.offsets) for e in victims for c in list(e.chunks)[:2]}
    assert report.tensors is not None
    assert set(report.tensors) == {e.key for e in index.tensors} - {e.key for e in victims}


def flip(path: Path, at: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)
    os.utime(path, (SAVED_AT, SAVED_AT))


def test_a_bit_that_changes_what_torch_reads_is_found(golden_copy: Callable[[str], Path]) -> None:
    """One flipped bit anywhere in data files; torch itself says whether it matters."""
    rng = random.Random(3)
    for name in ("torch_tied", "torch_fsdp2_zstd"):
        step = golden_copy(name)
        before = contents(step)
        file = step / "__0_0.distcp"
        good = file.read_bytes()
        unseen = 0
        for at in rng.sample(range(len(good)), 80):
            flip(file, at, 1 << rng.randrange(8))
            if dcp.validate(str(step), scrub=True).ok:
                unseen += 1
                assert contents(step) == before, f"byte {at}"
            file.write_bytes(good)
        assert unseen < 40


def test_a_transform_that_torch_does_not_undo_is_found(golden_copy: Callable[[str], Path]) -> None:
    step = golden_copy("torch_fsdp2_zstd")
    index = (step / ".metadata").read_bytes()
    assert dcp.validate(str(step), scrub=True, copied=True).ok
    (step / ".metadata").write_bytes(index.replace(b"stream.zstd/1", b"stream.zstd/5"))
    report = dcp.validate(str(step), scrub=True, copied=True)
    assert not report.ok
    assert "transform 'stream.zstd/5' is not known here" in report.findings[0].message


def mutate(data: bytearray, rng: random.Random) -> None:
    """Flip, cut out, double, overwrite from elsewhere, or zero some bytes."""
    at, size = rng.randrange(len(data)), rng.choice([1, 1, 4, 40, 400])
    match rng.randrange(6):
        case 0 | 1:
            data[at] ^= 1 << rng.randrange(8)
        case 2:
            del data[at : at + size]
        case 3:
            data[at:at] = data[at : at + size]
        case 4:
            source = rng.randrange(len(data))
            data[at : at + size] = data[source : source + size]
        case 5:
            data[at : at + size] = bytes(min(size, len(data) - at))


def contents(step: Path) -> dict[str, Any]:
    """Every key, place, shape and value, the values as torch's own reader takes them out of the files."""
    index = dcp.read_index(str(step))
    found: dict[str, Any] = {}
    for entry in index.entries.values():
        chunks = entry.chunks if isinstance(entry, TensorEntry) else [Chunk(Box((), ()), entry.record)]
        values = []
        for chunk in chunks:
            if chunk.box.volume == 0:
                continue
            record = chunk.record
            assert record is not None
            data = (step / record.path).read_bytes()[record.offset : record.end]
            if record.transforms:
                data = zstandard.ZstdDecompressor().stream_reader(data).read()
            value = torch.load(io.BytesIO(data), weights_only=True)
            values.append((chunk.box, content(value) if isinstance(value, torch.Tensor) else repr(value)))
        shape = (entry.shape, entry.dtype) if isinstance(entry, TensorEntry) else None
        found[entry.key] = (index.path_of(entry.key), shape, values)
    return found


@pytest.mark.parametrize("name", ["torch_tied", "torch_dtensor_2d_t2.3.1", "torch_per_rank_objects"])
@pytest.mark.parametrize("what", [".metadata", "data"])
def test_random_damage_never_passes_and_never_raises(
    name: str, what: str, golden_copy: Callable[[str], Path]
) -> None:
    step = golden_copy(name)
    before = contents(step)
    files = [p for p in sorted(step.iterdir()) if (p.name == ".metadata") == (what == ".metadata")]
    rng = random.Random(f"{name}{what}")
    passed = 0
    for _ in range(150):
        file = rng.choice(files)
        good = file.read_bytes()
        data = bytearray(good)
        for _ in range(rng.randint(1, 2)):
            if data:
                mutate(data, rng)
        file.write_bytes(data)
        os.utime(file, (SAVED_AT, SAVED_AT))
        report = dcp.validate(str(step), scrub=True)
        if not report.findings and bytes(data) != good:
            passed += 1
            assert contents(step) == before, "the content changed and nothing was found"
        file.write_bytes(good)
        os.utime(file, (SAVED_AT, SAVED_AT))
    assert passed < 50


def test_objects_are_judged_and_not_run(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    class Touches:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'planted'}",)

    state = {"w": torch.zeros(2), "fine": {"lr": 0.1}, "bad": (Touches(),)}
    save(state, storage_writer=FileSystemWriter(tmp_path / "c"), no_dist=True)
    assert dcp.validate(str(tmp_path / "c")).ok
    report = dcp.validate(str(tmp_path / "c"), scrub=True)
    (found,) = report.findings
    assert (found.code, found.severity, found.key) == ("records.unsafe", "error", "bad")
    assert any("system" in name for name in found.detail["globals"])
    assert not (tmp_path / "planted").exists()


def test_a_users_own_classes_may_be_allowed(golden: Callable[[str], Path]) -> None:
    step = str(golden("torch_objects"))
    report = dcp.validate(step, scrub=True, copied=True, allow=["__main__.*", "functools.partial"])
    assert [f for f in report.findings if f.code == "records.unsafe"] == []


def test_records_without_crc_are_said_to_be_unchecked(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    torch.serialization.set_crc32_options(False)
    try:
        save({"w": torch.ones(10)}, storage_writer=FileSystemWriter(tmp_path / "c"), no_dist=True)
    finally:
        torch.serialization.set_crc32_options(True)
    report = dcp.validate(str(tmp_path / "c"), scrub=True)
    assert report.ok
    assert [(f.code, f.file) for f in report.findings] == [("records.unchecked", "__0_0.distcp")]


def test_absurd_sizes_are_reported_at_once(golden_copy: Callable[[str], Path]) -> None:
    step = golden_copy("torch_tied")
    metadata = pickle.loads((step / ".metadata").read_bytes())
    for tensor in metadata.state_dict_metadata.values():
        tensor.size = tensor.chunks[0].sizes = torch.Size([10**15] + [10] * (len(tensor.size) - 1))
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    report = dcp.validate(str(step), scrub=True, copied=True)
    assert {f.key for f in report.findings if f.code == "records.mismatch"} == set(
        metadata.state_dict_metadata
    )


def test_a_checkpoint_that_changes_meanwhile_is_torn(golden_copy: Callable[[str], Path]) -> None:
    step = golden_copy("torch_fsdp_tp_2x2")

    def touch(_done: int, _total: int) -> None:
        os.utime(step / "__0_0.distcp", (SAVED_AT + 9, SAVED_AT + 9))

    report = dcp.validate(str(step), scrub=True, progress=touch)
    assert report.state == "torn"
    assert not report.ok
    assert "changed while" in report.findings[-1].message


@given(
    st.lists(st.floats(width=32), max_size=40),
    st.sampled_from(sorted(MEASURED - {"complex32", "complex64", "complex128"})),
)
def test_values_are_counted_as_torch_counts_them(values: list[float], dtype: str) -> None:
    tensor = torch.tensor(values, dtype=torch.float32).to(getattr(torch, dtype))
    data = memoryview(tensor.view(torch.uint8).numpy().tobytes()) if values else memoryview(b"")
    health = measure(data, dtype)
    wide = tensor.to(torch.float64)
    assert health.elements == len(values)
    assert health.nan == int(wide.isnan().sum())
    assert health.inf == int(wide.isinf().sum())
    assert health.zero == (len(values) > 0 and bool((wide == 0).all()))
    exact = float(wide[wide.isfinite()].norm())
    assert health.norm == pytest.approx(exact, rel=1e-3) or exact > 1e150 or exact < 1e-18


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
)
def test_every_byte_of_a_one_byte_float_is_judged_as_torch_judges_it(dtype: str) -> None:
    data = bytes(range(256))
    wide = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(getattr(torch, dtype)).to(torch.float32)
    health = measure(memoryview(data), dtype)
    assert (health.nan, health.inf) == (int(wide.isnan().sum()), int(wide.isinf().sum()))


def test_health_adds_up() -> None:
    whole, parts = measure(memoryview(np.arange(10, dtype="<f4").tobytes()), "float32"), Health()
    for part in (range(4), range(4, 10)):
        parts.add(measure(memoryview(np.array(part, dtype="<f4").tobytes()), "float32"))
    assert parts == whole


def test_what_cannot_be_read_at_all_is_no_surprise(golden_copy: Callable[[str], Path]) -> None:
    step = golden_copy("torch_tied")
    (step / ".metadata").write_bytes(b"\x80")
    report = dcp.validate(str(step), scrub=True)
    assert [f.code for f in report.findings] == ["metadata.unreadable"]
    with pytest.raises(MetadataError):
        dcp.read_index(str(step))


def test_against_an_earlier_step_values_are_compared(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    before = {"model.a": torch.randn(3, 3), "model.b": torch.randn(3, 3), "model.c": torch.randn(4)}
    after = {"model.a": before["model.a"], "model.b": before["model.b"] * 100, "model.c": torch.zeros(4)}
    for name, state in (("before", before), ("after", after)):
        save(state, storage_writer=FileSystemWriter(tmp_path / name), no_dist=True)
    report = dcp.validate(str(tmp_path / "after"), scrub=True, against=str(tmp_path / "before"))
    assert report.ok
    assert [(f.code, f.key, f.severity) for f in report.findings] == [
        ("values.unchanged", "model.a", "info"),
        ("values.norm-jump", "model.b", "warning"),
    ]
    same = dcp.validate(str(tmp_path / "before"), scrub=True, against=str(tmp_path / "before"))
    assert [f.detail["count"] for f in same.findings] == [3]


def test_weights_of_zeros_are_told(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    state = {"w": torch.zeros(2, 2), "bias": torch.zeros(2), "optim.state.w.exp_avg": torch.zeros(2, 2)}
    save(state, storage_writer=FileSystemWriter(tmp_path / "c"), no_dist=True)
    report = dcp.validate(str(tmp_path / "c"), scrub=True)
    assert {(f.code, f.key, f.severity) for f in report.findings} == {
        ("values.zero", "w", "warning"),
        ("values.zero", "optim.state.w.exp_avg", "info"),
    }


def test_what_only_a_record_tells_is_told(golden_copy: Callable[[str], Path]) -> None:
    step = golden_copy("torch_serialization_safetensors")
    data = next(iter(step.glob("*.distcp")))
    header = data.read_bytes()
    key = next(k for k, entry in dcp.read_index(str(step)).entries.items() if f'"{k}"'.encode() in header)
    data.write_bytes(header.replace(f'"{key}"'.encode(), f'"{key[:-1]}#"'.encode()))
    assert dcp.validate(str(step), copied=True).ok  # which does not read the data
    report = dcp.validate(str(step), scrub=True, copied=True)
    assert [(f.code, f.key) for f in report.findings if f.severity == "error"] == [("records.mismatch", key)]


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("chunk lost", "tiling.gap"),
        ("chunk and bytes lost", "tiling.gap"),
        ("chunk doubled", "tiling.overlap"),
        ("chunk too large", "tiling.out-of-bounds"),
        ("bytes lost", "records.missing"),
    ],
)
def test_a_scrub_beside_damage_of_the_index_says_each_thing_once(
    fault: str, code: str, golden_copy: Callable[[str], Path]
) -> None:
    step = golden_copy("torch_fsdp_tp_2x2")
    metadata = pickle.loads((step / ".metadata").read_bytes())
    described = metadata.state_dict_metadata.items()
    key, chunks = next((k, t.chunks) for k, t in described if len(getattr(t, "chunks", ())) == 4)
    place = next(i for i in metadata.storage_data if (i.fqn, i.offset) == (key, chunks[-1].offsets))
    match fault:
        case "chunk lost":
            chunks.pop()
        case "chunk and bytes lost":
            chunks.pop()
            del metadata.storage_data[place]
        case "chunk doubled":
            chunks.append(chunks[0])
        case "chunk too large":
            chunks[-1].sizes = torch.Size([99, 99])
        case "bytes lost":
            del metadata.storage_data[place]
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    report = dcp.validate(str(step), scrub=True, copied=True)
    assert not report.ok
    assert code in {f.code for f in report.findings}
    told = [(f.code, f.key, str(f.detail.get("offsets"))) for f in report.findings]
    assert len(told) == len(set(told))
    assert report.tensors is not None
    assert set(report.tensors) == {k for k, t in described if hasattr(t, "chunks")} - {key}
