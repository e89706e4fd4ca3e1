"""The stage *export* makes artifacts of every format below the published directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dcp.storage import open_store
from tasks.export import ExportRequest, artifacts_stand, export_step
from tasks.manifest import MANIFEST, encode, read_manifest
from tasks.tensor_check import completed
from tasks.verify import verify
from tests.support.train import SavedCheckpoint
from tests.tasks.test_aliases import manifest
from tests.tasks.test_verify import listed


def test_safetensors_are_exported_and_published_like_any_file(
    fsdp2_checkpoint: SavedCheckpoint, tmp_path: Path
) -> None:
    exported = export_step(
        str(fsdp2_checkpoint.path),
        str(tmp_path / "published"),
        parts=(),
        requests=[
            ExportRequest(format="safetensors", name="hf", include=("model.*",), max_shard_size=100_000)
        ],
        options={},
        publish_options={},
    )
    [artifact] = exported.artifacts
    assert artifacts_stand(open_store(str(tmp_path / "published")), exported.artifacts)
    assert {file.name.partition("/")[0] for file in artifact.files} == {"hf"}
    assert artifact.options["max_shard_size"] == 100_000
    assert artifact.tensors.keys() == {k for k in fsdp2_checkpoint.expected() if k.startswith("model.")}


def published(step: SavedCheckpoint, place: Path, **changes: Any) -> str:
    """A published directory with a `torch.save` file and safetensors of a step."""
    requests = [
        ExportRequest(**changes),
        ExportRequest(format="safetensors", name="hf", max_shard_size=100_000, **changes),
    ]
    exported = export_step(
        str(step.path), str(place), parts=(), requests=requests, options={}, publish_options={}
    )
    files = [file for artifact in exported.artifacts for file in artifact.files]
    store = open_store(str(place))
    artifacts = [completed(store, artifact) for artifact in exported.artifacts]
    made = manifest(1).model_copy(update={"files": files, "artifacts": artifacts})
    store.replace(MANIFEST, encode(made))
    return str(place)


def test_tensors_of_published_files_are_those_of_the_checkpoint(
    fsdp2_checkpoint: SavedCheckpoint, tmp_path: Path
) -> None:
    for number, changes in enumerate([{}, {"dtype": "bfloat16"}]):
        report = verify(published(fsdp2_checkpoint, tmp_path / str(number), **changes), deep=True)
        assert (report.ok, report.wrong_tensors) == (True, [])
        assert report.tensors == 2 * sum(
            isinstance(value, torch.Tensor) for value in fsdp2_checkpoint.expected().values()
        )
    assert verify(str(tmp_path / "0")).tensors is None


def test_a_tensor_that_is_not_the_checkpoints_is_named(
    fsdp2_checkpoint: SavedCheckpoint, tmp_path: Path
) -> None:
    """Even where files and their hashes in the manifest were changed together."""
    store = open_store(published(fsdp2_checkpoint, tmp_path / "p"))
    file = tmp_path / "p" / "checkpoint.pt"
    value = torch.load(file, weights_only=True)
    value["model"]["emb.weight"][3] += 1
    del value["model"]["head.weight"]
    torch.save(value, file)
    data = file.read_bytes()
    old = read_manifest(store)
    assert old is not None
    forged = listed("checkpoint.pt", data)
    artifact = old.artifacts[0].model_copy(update={"files": [forged], "bytes_written": forged.size})
    listing = [forged if f.name == "checkpoint.pt" else f for f in old.files]
    changed = old.model_copy(update={"files": listing, "artifacts": [artifact, *old.artifacts[1:]]})
    store.replace(MANIFEST, encode(changed))
    assert verify(store.url).ok
    report = verify(store.url, deep=True)
    assert not report.ok
    assert {(t.artifact, t.name, t.message.split(" ")[0]) for t in report.wrong_tensors} == {
        ("checkpoint.pt", "model.emb.weight", "its"),
        ("checkpoint.pt", "model.head.weight", "the"),
        ("checkpoint.pt", "checkpoint.pt", "the"),
    }


def test_what_was_tied_is_recorded(golden: Callable[[str], Path], tmp_path: Path) -> None:
    requests = [
        ExportRequest(tie=True),
        ExportRequest(tie=True, format="safetensors", name="hf"),
        ExportRequest(name="plain.pt"),
    ]
    exported = export_step(
        str(golden("torch_tied")), str(tmp_path), parts=(), requests=requests, options={}, publish_options={}
    )
    one, other, plain = exported.artifacts
    assert one.tied
    assert one.tied == other.tied
    assert one.tensors.keys() - other.tensors.keys() == one.tied.keys()
    assert plain.tied == {}
