"""`validate`: whole checkpoints are never accused, each damage has its code and place."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dcp
from dcp.checkpoint import open_checkpoint, survey
from dcp.contract import contract_of
from dcp.errors import NotFoundError, UsageError
from dcp.findings import CODES, SEVERITY
from dcp.validation import ValidationReport, validate
from tests.support.golden import GOLDENS, SAVED_AT, Golden
from tests.support.train import SavedCheckpoint

ODD = {
    "torch_torchao": ("committed", True, {"records.unchecked"}),
    "not_dcp_verl_fsdp": ("not-dcp", False, {"metadata.unsupported"}),
    "torch_hf_sharded": ("not-dcp", False, {"metadata.unsupported"}),
    "torch_fsdp2_rank_local": ("committed", True, {"metadata.unsupported"}),
}


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
def test_goldens(golden: Golden, tmp_path: Path) -> None:
    copy = tmp_path / golden.directory.name
    shutil.copytree(golden.directory, copy)
    report = dcp.validate(str(copy), copied=True)
    state, ok, codes = ODD.get(golden.name, ("committed", True, set()))
    assert (report.state, report.ok, {f.code for f in report.findings}) == (state, ok, codes)


def edit_index(directory: Path, change: Callable[[Any], None]) -> None:
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    os.utime(path, (SAVED_AT + 1, SAVED_AT + 1))


def damaged(directory: Path, **options: Any) -> ValidationReport:
    report = dcp.validate(str(directory), **options)
    assert not report.ok
    return report


def only(report: ValidationReport, code: str) -> Any:
    """The one finding, which must be of ``code``."""
    (found,) = report.findings
    assert found.code == code
    assert found.severity == "error"
    return found


@pytest.fixture
def step(golden_copy: Callable[[str], Path]) -> Path:
    return golden_copy("torch_fsdp_tp_2x2")


def test_missing_file(step: Path) -> None:
    (step / "__2_0.distcp").unlink()
    report = damaged(step)
    found = only(report, "files.missing")
    assert report.state == "torn"
    assert found.file == "__2_0.distcp"


@pytest.mark.parametrize("keep", [0, 1, 1000, -1])
def test_truncated_file(step: Path, keep: int) -> None:
    file = step / "__2_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    os.utime(file, (SAVED_AT, SAVED_AT))
    report = damaged(step)
    found = only(report, "files.truncated")
    assert report.state == "torn"
    assert found.file == file.name
    assert found.detail["expected"] == len(data)
    assert found.detail["actual"] == len(data[:keep])
    assert found.key


def test_overwritten_file(step: Path) -> None:
    os.utime(step / "__2_0.distcp", (SAVED_AT + 1000, SAVED_AT + 1000))
    report = damaged(step)
    assert report.state == "torn"
    assert only(report, "files.newer-than-metadata").file == "__2_0.distcp"
    copied = dcp.validate(str(step), copied=True)
    assert copied.ok
    assert [(f.code, f.severity) for f in copied.findings] == [("files.newer-than-metadata", "warning")]
    assert dcp.validate(str(step), newer_seconds=2000).ok


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "gs://other/x", "a/../../b", ""])
def test_paths_are_not_followed_outside(step: Path, path: str) -> None:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            if info.relative_path == "__1_0.distcp":
                info.relative_path = path

    edit_index(step, change)
    report = damaged(step)
    assert {f.code for f in report.findings if f.severity == "error"} == {"files.unsafe-path"}


def first_chunks(metadata: Any) -> tuple[str, Any]:
    return next((k, v) for k, v in metadata.state_dict_metadata.items() if len(getattr(v, "chunks", ())) == 4)


def test_gap_overlap_and_bounds(step: Path, tmp_path: Path) -> None:
    import torch

    cases: dict[str, Callable[[Any], None]] = {
        "tiling.gap": lambda chunks: chunks.pop(),
        "tiling.overlap": lambda chunks: chunks.append(chunks[0]),
        "tiling.out-of-bounds": lambda chunks: setattr(chunks[3], "sizes", torch.Size([900, 900])),
    }
    for code, change in cases.items():
        copy = tmp_path / code
        shutil.copytree(step, copy)
        key = ""

        def edit(metadata: Any, change: Callable[[Any], None] = change) -> None:
            nonlocal key
            key, tensor = first_chunks(metadata)
            change(tensor.chunks)

        edit_index(copy, edit)
        report = damaged(copy)
        found = next(f for f in report.findings if f.code == code)
        assert found.key == key
        assert found.detail["offsets"]
        assert report.state == "committed"


def test_record_ranges(step: Path, tmp_path: Path) -> None:
    def set_info(metadata: Any, **values: int) -> None:
        key, tensor = first_chunks(metadata)
        info = next(
            i
            for m, i in metadata.storage_data.items()
            if (m.fqn, m.offset) == (key, tensor.chunks[0].offsets)
        )
        info.__dict__.update(values)

    cases: list[tuple[str, Callable[[Any], None]]] = [
        ("records.out-of-bounds", lambda m: set_info(m, offset=-5)),
        ("records.out-of-bounds", lambda m: set_info(m, offset=10**12)),
        ("records.out-of-bounds", lambda m: set_info(m, length=-1)),
        ("records.mismatch", lambda m: set_info(m, length=0)),
        ("records.overlap", lambda m: set_info(m, offset=0)),
        ("records.mismatch", lambda m: set_info(m, length=3)),
        ("records.missing", lambda m: m.storage_data.popitem()),
    ]
    for number, (code, change) in enumerate(cases):
        copy = tmp_path / f"{number}"
        shutil.copytree(step, copy)
        edit_index(copy, change)
        report = damaged(copy)
        assert code in {f.code for f in report.findings}, (code, report.findings)


def test_absurd_tensors_are_reported_not_allocated(step: Path) -> None:
    import torch

    def change(metadata: Any) -> None:
        _, tensor = first_chunks(metadata)
        tensor.size = torch.Size([10**9, 10**6])
        tensor.chunks = tensor.chunks[:1]
        tensor.chunks[0].sizes = tensor.size

    edit_index(step, change)
    assert "records.mismatch" in {f.code for f in damaged(step).findings}


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "metadata.empty"),
        (b"junk", "metadata.unreadable"),
        (b"\x80\x04cos\nsystem\n.", "metadata.unsafe"),
    ],
)
def test_bad_index(step: Path, data: bytes, code: str) -> None:
    (step / ".metadata").write_bytes(data)
    assert only(damaged(step), code).file == ".metadata"


def test_writing_then_incomplete(step: Path) -> None:
    (step / ".metadata").unlink()
    young = damaged(step, now=SAVED_AT + 60)
    assert young.state == "writing"
    ahead = damaged(step, now=SAVED_AT - 3600)
    assert ahead.state == "writing"
    assert ahead.findings[0].message.endswith("dated 60 min ahead of this machine's clock")
    old = damaged(step, now=SAVED_AT + 3600)
    assert old.state == "incomplete"
    only(old, "incomplete.no-metadata")
    assert damaged(step, now=SAVED_AT + 60, grace_seconds=30).state == "incomplete"
    os.utime(step / "__0_0.distcp", (SAVED_AT + 3500,) * 2)
    assert damaged(step, now=SAVED_AT + 3600).state == "writing"


def test_orphans_are_a_warning(step: Path) -> None:
    (step / "__9_0.distcp").write_bytes(b"left over")
    (step / "__8_0.distcp").write_bytes(b"")
    (step / "notes.txt").write_bytes(b"mine")
    report = dcp.validate(str(step))
    assert report.ok
    assert [(f.code, f.severity, f.file) for f in report.findings] == [
        ("files.orphan", "warning", "__9_0.distcp")
    ]


def test_a_missing_rank_of_a_rank_local_save_is_a_gap(golden_copy: Callable[[str], Path]) -> None:
    step = golden_copy("torch_fsdp2_rank_local")
    (step / "__1.metadata").unlink()
    assert "tiling.gap" in {f.code for f in damaged(step).findings}


def test_parts_are_judged_as_a_whole(golden_copy: Callable[[str], Path]) -> None:
    step = golden_copy("accelerate_fsdp2")
    report = dcp.validate(str(step))
    assert report.ok
    assert report.stats.keys == 49 + 13
    file = step / "optimizer_0" / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-10])
    os.utime(file, (SAVED_AT, SAVED_AT))
    report = damaged(step)
    assert report.state == "torn"
    assert only(report, "files.truncated").file == "optimizer_0/__1_0.distcp"


def test_a_part_that_was_not_committed_makes_the_step_incomplete(golden_copy: Callable[[str], Path]) -> None:
    step = golden_copy("accelerate_fsdp2")
    (step / "optimizer_0" / ".metadata").unlink()
    report = dcp.validate(str(step))
    assert (report.state, report.ok) == ("incomplete", False)
    assert only(report, "incomplete.no-metadata").file == "optimizer_0/.metadata"
    with pytest.raises(dcp.errors.NotLoadableError, match=r"optimizer_0 has no \.metadata"):
        dcp.test_load(str(step))
    # The other one is still to come as well, or did not come either.
    (step / "pytorch_model_fsdp_0" / ".metadata").unlink()
    assert dcp.validate(str(step)).state == "incomplete"
    assert dcp.validate(str(step), now=SAVED_AT + 60.0).state == "writing"


def test_contract(step: Path, golden: Callable[[str], Path]) -> None:
    import torch

    expected = contract_of(dcp.read_index(str(step)))
    assert dcp.validate(str(step), contract=expected).ok

    def change(metadata: Any) -> None:
        described = metadata.state_dict_metadata
        described["model.new"] = described.pop("model.cnt")
        described["model.a.bias"].properties.dtype = torch.int32
        described["optim.param_groups.0.foreach"] = described["model.new"]

    edit_index(step, change)
    found = {f.code: f for f in damaged(step, contract=expected).findings}
    assert found["keys.renamed"].detail["renames"] == {"model.cnt": "model.new"}
    assert found["keys.dtype"].key == "model.a.bias"
    assert found["keys.kind"].key == "optim.param_groups.0.foreach"
    other = damaged(step, against=str(golden("torch_tied")))
    assert {"keys.missing", "keys.unexpected"} <= {f.code for f in other.findings}


def test_a_wrapped_model_is_one_rename(step: Path) -> None:
    expected = contract_of(dcp.read_index(str(step)))

    def change(metadata: Any) -> None:
        for key in list(metadata.state_dict_metadata):
            if key.startswith("model."):
                wrapped = "model.module." + key[6:]
                metadata.state_dict_metadata[wrapped] = metadata.state_dict_metadata.pop(key)
                metadata.planner_data[wrapped] = ("model", wrapped[6:])
                del metadata.planner_data[key]

    edit_index(step, change)
    found = [f for f in damaged(step, contract=expected).findings if f.code.startswith("keys.")]
    assert [f.code for f in found] == ["keys.renamed"]
    assert "'module.' was inserted" in found[0].message


def test_a_contract_that_is_none_is_a_usage_error(tmp_path: Path, step: Path) -> None:
    (tmp_path / "c.json").write_text('{"version": 7, "keys": {}}')
    with pytest.raises(UsageError, match="version"):
        dcp.validate(str(step), contract=str(tmp_path / "c.json"))
    with pytest.raises(NotFoundError):
        dcp.validate(str(step), contract=str(tmp_path / "none.json"))


def test_nothing_there_is_not_incomplete(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        dcp.validate(str(tmp_path / "nothing"))


def test_fingerprint_follows_the_bytes(step: Path) -> None:
    first = dcp.validate(str(step)).fingerprint
    assert dcp.validate(str(step)).fingerprint == first
    os.utime(step / "__0_0.distcp", (SAVED_AT + 2, SAVED_AT + 2))
    assert dcp.validate(str(step)).fingerprint != first


def test_fresh_real_save_in_a_bucket(fsdp2_checkpoint: SavedCheckpoint, gs_bucket: str) -> None:
    from dcp.storage import open_store

    store = open_store(gs_bucket + "/run/step_2")
    for path in sorted(fsdp2_checkpoint.path.iterdir(), key=lambda p: p.name == ".metadata"):
        store.replace(path.name, path.read_bytes())
    time.sleep(0.01)
    report = dcp.validate(store.url)
    assert report.ok
    assert [(f.code, f.severity) for f in report.findings] == [("ranks.shared-value", "warning")]
    assert report.checkpoint == store.url


def test_every_code_has_a_severity_and_advice() -> None:
    from dcp.advice import advice_for

    assert set(SEVERITY) == set(CODES)
    assert all(advice_for(code, "gs://b/step_1") for code in CODES)


def test_torch_is_not_needed(step: Path) -> None:
    code = (
        "import sys, dcp\n"
        f"assert dcp.validate({str(step)!r}).ok\n"
        f"dcp.inspect({str(step)!r})\n"
        "assert not {'torch', 'prefect'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_inspect(step: Path) -> None:
    report = dcp.inspect(str(step))
    assert report.totals.keys == len(report.keys) == 52
    assert report.totals.ranks == 4
    weight = next(k for k in report.keys if k.key == "model.a.weight")
    assert (weight.kind, weight.dtype) == ("tensor", "float32")
    assert weight.shape is not None
    assert sum(f.records for f in report.files) == sum(k.chunks for k in report.keys)
    assert [k.key for k in dcp.inspect(str(step), keys="model.a.*").keys] == [
        "model.a.weight",
        "model.a.bias",
    ]


def test_a_directory_above_checkpoints_says_where_they_are(golden: Callable[[str], Path]) -> None:
    report = damaged(golden("torchtitan_async.step-4").parents[1])
    assert report.state == "not-dcp"
    assert report.findings[0].message.endswith("torchtitan_async/checkpoint/step-4")


def test_bytes_of_nothing_described_are_told(step: Path) -> None:
    def forget(metadata: Any) -> None:
        del metadata.state_dict_metadata["model.cnt"]
        del metadata.planner_data["model.cnt"]

    edit_index(step, forget)
    assert {(f.code, f.key) for f in damaged(step).findings} == {("records.mismatch", "model.cnt")}


def test_damage_met_on_the_way_is_told_once(step: Path) -> None:
    """The lists of an optimizer's groups are read without a scrub too."""
    record = next(
        o.record for o in dcp.read_index(str(step)).objects if o.key.endswith("param_groups.0.params")
    )
    assert record is not None
    file = step / record.path
    data = bytearray(file.read_bytes())
    data[record.offset + 70] ^= 1
    file.write_bytes(data)
    os.utime(file, (SAVED_AT, SAVED_AT))
    for scrub in (False, True):
        found = only(damaged(step, scrub=scrub), "records.corrupt")
        assert found.key == "optim.param_groups.0.params"


def test_fields_of_a_later_version_are_said_to_be_unread(step: Path) -> None:
    edit_index(step, lambda metadata: setattr(metadata, "invented", 3))
    report = dcp.validate(str(step))
    assert report.ok
    assert [(f.code, f.detail["fields"]) for f in report.findings] == [("records.unchecked", ["invented"])]


def test_producers(golden: Callable[[str], Path]) -> None:
    names = {
        "torchtitan_async.step-4": "torchtitan",
        "megatron_torch_dist_plain": "Megatron-Core torch_dist",
        "lightning_trainer_modelparallel": "Lightning",
        "composer_sharded": "Composer",
        "accelerate_fsdp2.optimizer_0": "accelerate",
        "torch_fsdp_tp_2x2": "torch DCP",
        "torch_fsdp2_rank_local": "torch DCP, rank-local",
    }
    names["accelerate_fsdp2"] = "accelerate"
    assert {name: dcp.inspect(str(golden(name))).producer for name in names} == names


def test_nemo_is_megatron_with_a_context_beside(golden: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(golden("megatron_torch_dist_plain"), tmp_path / "step" / "weights")
    (tmp_path / "step" / "context").mkdir()
    (tmp_path / "step" / "context" / "model.yaml").write_text("x: 1")
    assert dcp.inspect(str(tmp_path / "step")).producer == "NeMo"
    assert dcp.inspect(str(tmp_path / "step" / "weights")).producer == "NeMo"
    assert dcp.validate(str(tmp_path / "step"), copied=True).ok


def test_inspect_shows_all_parts_of_a_step(golden: Callable[[str], Path]) -> None:
    report = dcp.inspect(str(golden("accelerate_fsdp2")))
    parts = [
        dcp.inspect(str(golden("accelerate_fsdp2") / name))
        for name in ("optimizer_0", "pytorch_model_fsdp_0")
    ]
    assert report.totals.keys == sum(part.totals.keys for part in parts)
    assert report.totals.bytes == sum(part.totals.bytes for part in parts)
    assert {key.key.partition("/")[0] for key in report.keys} == {"optimizer_0", "pytorch_model_fsdp_0"}
    assert sum(file.records for file in report.files) == report.totals.chunks + report.totals.objects
    assert report.fingerprint == dcp.validate(str(golden("accelerate_fsdp2"))).fingerprint


def test_a_survey_reads_an_index_once_for_all_that_ask() -> None:
    found = survey(str(GOLDENS[0].directory))
    assert open_checkpoint(found) is found.checkpoint is open_checkpoint(found)
    fingerprint = found.checkpoint.fingerprint
    assert validate(found).fingerprint == fingerprint == validate(found.store.url).fingerprint
