"""Shards written one by one, in any order, are what one export writes."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dcp.errors import BusyError, ChangedError, EnvironmentFault, UsageError
from dcp.exporting import export
from dcp.exporting.report import ExportReport
from dcp.exporting.shards import (
    ShardedExport,
    ShardPlan,
    WrittenShard,
    claimed_shards,
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


def _finish(what: ShardedExport, plan: ShardPlan, written: list[WrittenShard]) -> ExportReport:
    return finish_shards(what, plan, written, held=lambda: None, started=time.perf_counter())


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
    report = _finish(what, plan, written)
    assert _content(tmp_path / "many/out") == _content(tmp_path / "one/out")
    left_out = {"dest", "seconds", "peak_memory", "bytes_read"}
    assert report.model_dump(exclude=left_out) == whole.model_dump(exclude=left_out)
    assert [planned.bytes for planned in plan.shards] == [file.size for file in report.files[:-1]]


def test_an_older_export_stands_until_the_last_shard(golden: Callable[[str], Path], tmp_path: Path) -> None:
    source = str(golden(NAME))
    what = ShardedExport(source, str(tmp_path / "out"), max_shard_size=SIZE)
    older = replace(what, max_shard_size=SIZE // 2)
    _finish(older, *_one_by_one(older))
    before = _content(tmp_path / "out")
    plan, written = _one_by_one(what)
    assert before.items() <= _content(tmp_path / "out").items()
    with pytest.raises(UsageError, match=f"{len(written) - 1} of {len(written)} shards"):
        _finish(what, plan, written[1:])
    assert before.items() <= _content(tmp_path / "out").items()
    report = _finish(what, plan, written)
    assert {f"out/{name}" for name in _content(tmp_path / "out")} == {file.name for file in report.files}
    assert [file.name for file in plan.shards] == [file.name for file in report.files[:-1]]


def test_an_index_never_leads_to_what_somebody_replaced(
    golden: Callable[[str], Path], tmp_path: Path
) -> None:
    what = ShardedExport(str(golden(NAME)), str(tmp_path / "out"), max_shard_size=SIZE)
    other = replace(what, include=("model.*",))
    plan, written = _one_by_one(what)
    strange = write_shard(other, plan_shards(other), 0).file.name
    (tmp_path / strange).replace(tmp_path / plan.shards[0].name)
    with pytest.raises(EnvironmentFault, match="not there any more"):
        _finish(what, plan, written)
    (tmp_path / plan.shards[0].name).unlink()
    with pytest.raises(EnvironmentFault, match="not there any more"):
        _finish(what, plan, written)
    assert not (tmp_path / "out/model.safetensors.index.json").exists()


def test_one_export_has_the_directory(golden: Callable[[str], Path], tmp_path: Path) -> None:
    what = ShardedExport(str(golden(NAME)), str(tmp_path / "out"), max_shard_size=SIZE)
    with claimed_shards(what):
        with pytest.raises(BusyError), claimed_shards(what):
            pass
        with pytest.raises(BusyError):
            export(what.url, what.dest, format="safetensors")
    assert export(what.url, what.dest, format="safetensors").ok


def test_a_directory_in_the_checkpoint_is_not_touched(golden_copy: Callable[[str], Path]) -> None:
    source = golden_copy(NAME)
    before = sorted(source.rglob("*"))
    for dest in (source, source / "out"):
        with (
            pytest.raises(UsageError, match="inside the checkpoint"),
            claimed_shards(ShardedExport(str(source), str(dest))),
        ):
            pass
    assert sorted(source.rglob("*")) == before


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
        _finish(what, plan, written)
    assert _content(tmp_path / "out") == {}


def test_one_file_is_no_sharded_export(golden: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name a directory"):
        plan_shards(ShardedExport(str(golden(NAME)), str(tmp_path / "out.safetensors")))
