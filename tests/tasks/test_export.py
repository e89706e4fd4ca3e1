"""The stage *export* makes artifacts of every format below the published directory."""

from __future__ import annotations

from pathlib import Path

from dcp.storage import open_store
from tasks.export import ExportRequest, artifacts_stand, export_step
from tests.support.train import SavedCheckpoint


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
