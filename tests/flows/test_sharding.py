"""Shards over Prefect's task runners, for real: threads, and a local Dask cluster of two processes."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from prefect import flow

from dcp.errors import CheckpointError
from dcp.exporting.shards import WrittenShard
from flows.deploy_settings import DeploySettings
from flows.sharding import shard_mapper
from tasks.export import ExportRequest, StepExport, export_step
from tasks.export_shards import ShardWriter
from tasks.prefect_tasks import call_as_task

NAME = "torch_fsdp_tp_2x2"
REQUEST = ExportRequest(format="safetensors", name="tensors", max_shard_size=1_000)


def test_one_process_writes_them_unless_more_is_asked_for() -> None:
    assert shard_mapper(DeploySettings()) is None


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_api")
@pytest.mark.parametrize("dask", ["", "local"])
def test_shards_of_one_export(golden: Callable[[str], Path], tmp_path: Path, dask: str) -> None:
    source = str(golden(NAME))
    deploy = DeploySettings(shards_at_once=2, dask=dask)

    @flow(name="exporting")
    def exporting() -> StepExport:
        return call_as_task(
            export_step,
            source,
            str(tmp_path / "mapped"),
            parts=(),
            requests=[REQUEST],
            options={},
            publish_options={},
            mapped=shard_mapper(deploy),
        )

    [artifact] = exporting().artifacts
    [plain] = export_step(
        source, str(tmp_path / "plain"), parts=(), requests=[REQUEST], options={}, publish_options={}
    ).artifacts
    assert len(artifact.files) == 4
    assert artifact.files == plain.files
    assert artifact.tensors == plain.tensors
    for file in plain.files:
        assert (tmp_path / "mapped" / file.name).read_bytes() == (tmp_path / "plain" / file.name).read_bytes()


def test_a_shard_that_fails_leaves_none_of_them(golden_copy: Callable[[str], Path], tmp_path: Path) -> None:
    source = golden_copy(NAME)

    def spoil_after_first(writer: ShardWriter, count: int) -> list[WrittenShard]:
        written = [writer(0)]
        assert any((tmp_path / "out/tensors").glob("model-*"))
        for data in source.glob("*.distcp"):
            os.truncate(data, data.stat().st_size // 2)
        return [*written, *(writer(number) for number in range(1, count))]

    with pytest.raises(CheckpointError):
        export_step(
            str(source),
            str(tmp_path / "out"),
            parts=(),
            requests=[REQUEST],
            options={},
            publish_options={},
            mapped=spoil_after_first,
        )
    assert list((tmp_path / "out").rglob("*.safetensors*")) == []
