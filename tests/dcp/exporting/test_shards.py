"""Shards written one by one, in any order, are what one export writes."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dcp.errors import ChangedError, UsageError
from dcp.exporting import export
from dcp.exporting.shards import (
    ShardedExport,
    ShardPlan,
    WrittenShard,
    finish_shards,
    plan_shards,
    write_shard,
)

NAME = "torch_fsdp_tp_2x2"
SIZE = 1_000


def _one_by_one(what: ShardedExport) -> tuple[ShardPlan, list[WrittenShard]]:
    plan = plan_shards(what)
    assert len(plan.shards) > 2
    return plan, [write_shard(what, plan, number) for number in reversed(range(len(plan.shards)))]


def _content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}


@pytest.mark.parametrize("tie", [False, True])
def test_the_same_bytes_and_the_same_report(golden: Callable[[str], Path], tmp_path: Path, tie: bool) -> None:
    name = "torch_tied" if tie else NAME
    size = 100 if tie else SIZE
    source = str(golden(name))
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    whole = export(
        source, str(tmp_path / "one/out"), format="safetensors", max_shard_size=size, tie=tie, sha256=True
    )
    what = ShardedExport(source, str(tmp_path / "many/out"), max_shard_size=size, tie=tie, sha256=True)
    plan = plan_shards(what)
    written = [write_shard(what, plan, number) for number in reversed(range(len(plan.shards)))]
    report = finish_shards(what, plan, written, started=time.perf_counter())
    assert _content(tmp_path / "many/out") == _content(tmp_path / "one/out")
    left_out = {"dest", "seconds", "peak_memory", "bytes_read"}
    assert report.model_dump(exclude=left_out) == whole.model_dump(exclude=left_out)
    assert [planned.bytes for planned in plan.shards] == [file.size for file in report.files[:-1]]


def test_no_index_stands_before_the_last_shard(golden: Callable[[str], Path], tmp_path: Path) -> None:
    source = str(golden(NAME))
    what = ShardedExport(source, str(tmp_path / "out"), max_shard_size=SIZE)
    older = replace(what, max_shard_size=SIZE // 2)
    plan, written = _one_by_one(older)
    finish_shards(older, plan, written, started=0.0)
    index = tmp_path / "out" / "model.safetensors.index.json"
    assert index.exists()
    plan, written = _one_by_one(what)
    assert not index.exists()
    with pytest.raises(UsageError, match=f"{len(written) - 1} of {len(written)} shards"):
        finish_shards(what, plan, written[1:], started=0.0)
    assert not index.exists()
    finish_shards(what, plan, written, started=0.0)
    assert len(list((tmp_path / "out").glob("model-*"))) == len(written)


def test_a_checkpoint_saved_over_meanwhile_is_not_exported(
    golden_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    source = golden_copy(NAME)
    what = ShardedExport(str(source), str(tmp_path / "out"), max_shard_size=SIZE)
    plan, written = _one_by_one(what)
    data = next(source.glob("*.distcp"))
    data.write_bytes(data.read_bytes())
    with pytest.raises(ChangedError):
        write_shard(what, plan, 0)
    with pytest.raises(ChangedError):
        finish_shards(what, plan, written, started=0.0)
    assert _content(tmp_path / "out") == {}


def test_one_file_is_no_sharded_export(golden: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name a directory"):
        plan_shards(ShardedExport(str(golden(NAME)), str(tmp_path / "out.safetensors")))
