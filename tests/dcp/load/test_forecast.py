"""The forecast against what readers measure when ranks really load."""

import os
import time
import warnings
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.storage import StorageReader

import dcp
from dcp.boxes import Box
from dcp.checkpoint import open_checkpoint
from dcp.errors import NotLoadableError, UsageError
from dcp.index import CheckpointIndex, Chunk, Chunks, Entry, ObjectEntry, TensorEntry
from dcp.layout import Layout
from dcp.load import test_load as load_test
from dcp.load.counting import Columns, RankReads, count, counts
from dcp.load.forecast import DEFAULT_RANKS, ForecastReport, forecast
from dcp.load.metadata import torch_dtype
from dcp.load.ranks import InertPlanner
from dcp.load.reader import BucketReader
from dcp.load.standin import Arena, StandIn
from dcp.record import Record
from dcp.tp_rules import TpRules
from tests.dcp.load.expectations import save


def load(path: str, layout: Layout, rank: int, reader: StorageReader) -> None:
    """Load as one rank of a layout does."""
    index = open_checkpoint(path).index
    state: dict[str, Any] = {entry.key: None for entry in index.objects}
    for entry in index.tensors:
        box = layout.boxes(entry.shape, entry.key)[rank]
        state[entry.key] = StandIn(entry.shape, torch_dtype(entry), [box] if box.volume else [], Arena())
    with warnings.catch_warnings(action="ignore"):
        torch_checkpoint.load(state, storage_reader=reader, planner=InertPlanner(), no_dist=True)


class CountingReader(torch_checkpoint.FileSystemReader):
    """torch's reader, counting the bytes and the number of the pieces of files that it reads."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.bytes_read = self.requests = 0

    def _slice_file(self, file: Any, info: Any) -> Any:
        inner = super()._slice_file(file, info)
        self.requests += 1
        read, readinto = inner.read, inner.readinto

        def counted_read(size: int = -1) -> bytes:
            data: bytes = read(size)
            self.bytes_read += len(data)
            return data

        def counted_readinto(buffer: Any) -> int:
            got: int = readinto(buffer)
            self.bytes_read += got
            return got

        inner.read, inner.readinto = counted_read, counted_readinto
        return inner


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tensors of all sorts of proportions, small and large, and an object."""
    state: dict[str, Any] = {
        "big": torch.zeros(3000, 3000),
        "wide": torch.zeros(20, 40000),
        "long": torch.zeros(3, 2_500_000),
        "cube": torch.zeros(40, 30, 500),
        "vector": torch.zeros(100),
        "scalar": torch.tensor(1.0),
        "nothing": torch.zeros(0, 4),
        "object": 5,
    }
    state.update({f"m{number}": torch.zeros(300, 100) for number in range(60)})
    return str(save(state, tmp_path_factory.mktemp("forecast") / "step"))


def counted(path: str, layout: Layout, rank: int) -> RankReads:
    return count(Columns.of(open_checkpoint(path).index), layout, rank)


@pytest.mark.parametrize("text", ["fsdp=1", "fsdp=2", "fsdp=3", "fsdp=64", "tp=2", "tp=3", "fsdp=2,tp=2"])
def test_what_our_reader_reads(path: str, text: str) -> None:
    layout = Layout.parse(text)
    for rank in {0, layout.ranks // 2, layout.ranks - 1}:
        reader = BucketReader(path)
        load(path, layout, rank, reader)
        expected = counted(path, layout, rank)
        assert reader.bytes_read == pytest.approx(expected.bucket_reader.bytes, rel=0.001)
        assert reader.requests == pytest.approx(expected.bucket_reader.requests, abs=2)
        boxes = [(e, layout.boxes(e.shape)[rank]) for e in open_checkpoint(path).index.tensors]
        tensors = sum(box.volume * torch_dtype(entry).itemsize for entry, box in boxes)
        [entry] = open_checkpoint(path).index.objects
        assert entry.record is not None
        assert expected.needed == tensors + entry.record.length


@pytest.mark.parametrize("text", ["fsdp=1", "fsdp=3", "tp=3", "fsdp=2,tp=2"])
@pytest.mark.parametrize("name", ["torch_fsdp_tp_2x2", "torch_fsdp2_zstd", "torch_exotic_2rank"])
def test_goldens_are_foretold_exactly(golden: Callable[[str], Path], name: str, text: str) -> None:
    where, layout = str(golden(name)), Layout.parse(text)
    for rank in range(layout.ranks):
        reader = BucketReader(where)
        load(where, layout, rank, reader)
        expected = counted(where, layout, rank).bucket_reader
        assert (reader.bytes_read, reader.requests) == (expected.bytes, expected.requests)


@pytest.mark.parametrize("text", ["fsdp=3", "tp=3", "fsdp=64"])
def test_what_torchs_reader_reads(path: str, text: str) -> None:
    layout = Layout.parse(text)
    for rank in (0, layout.ranks - 1):
        reader = CountingReader(path)
        load(path, layout, rank, reader)
        expected = counted(path, layout, rank).torch_reader
        assert reader.requests == expected.requests
        # A zip's end is looked at more than once.
        assert expected.bytes <= reader.bytes_read <= expected.bytes + 4096 * expected.requests


def test_the_report_adds_the_ranks_up(path: str) -> None:
    report = forecast(path, layouts=["fsdp=2,tp=2", "fsdp=5"])
    assert [(each.layout, each.ranks) for each in report.layouts] == [("fsdp=2,tp=2", 4), ("fsdp=5", 5)]
    assert (report.tensors, report.chunks, report.objects) == (67, 67, 1)
    for each in report.layouts:
        ranks = [counted(path, Layout.parse(each.layout), rank) for rank in range(each.ranks)]
        ours = [rank.bucket_reader for rank in ranks]
        assert each.bytes_loaded == sum(rank.needed for rank in ranks)
        [loaded] = load_test(path, [each.layout]).layouts
        assert each.bytes_needed == loaded.bytes_needed <= each.bytes_loaded
        assert each.bucket_reader.bytes == sum(one.bytes for one in ours)
        assert each.bucket_reader.requests == sum(one.requests for one in ours)
        assert each.bucket_reader.slowest_bytes == max(one.bytes for one in ours)
        assert ours[each.bucket_reader.slowest_rank].requests == each.bucket_reader.slowest_requests
        assert each.torch_reader.amplification == round(each.torch_reader.bytes / each.bytes_loaded, 4)
    assert ForecastReport.model_validate_json(report.model_dump_json()) == report
    assert dcp.forecast is forecast


RULES = TpRules.of({"big": "column", "cube": 2, "m*": "row", "long": "column", "w": 1})


@pytest.mark.parametrize("text", ["tp=3", "fsdp=2,tp=2", "fsdp=3,tp=4"])
def test_what_our_reader_reads_where_rules_shard(path: str, text: str) -> None:
    layout = Layout.parse(text, RULES)
    columns = Columns.of(open_checkpoint(path).index, RULES)
    for rank in {0, layout.ranks // 2, layout.ranks - 1}:
        reader = BucketReader(path)
        load(path, layout, rank, reader)
        expected = count(columns, layout, rank)
        assert reader.bytes_read == pytest.approx(expected.bucket_reader.bytes, rel=0.001)
        assert reader.requests == pytest.approx(expected.bucket_reader.requests, abs=2)
    report = forecast(path, layouts=[text], tp_rules=RULES)
    assert report.layouts[0].bytes_loaded == sum(each.needed for each in counts(columns, layout))


@st.composite
def chunked(draw: st.DrawFn) -> CheckpointIndex:
    """Tensors in chunks of some rows each, and an object."""
    entries: dict[str, Entry] = {"o": ObjectEntry("o", Record("f", 0, 700))}
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
        size = draw(st.integers(1, 40))
        chunks = []
        for start in range(0, shape[0] if shape else 1, size):
            sizes = (min(size, shape[0] - start), *shape[1:]) if shape else ()
            record = Record(f"f{start % 3}", 100_000 * number + 1000 * start, 4 * prod(sizes) + 1000)
            chunks.append(Chunk(Box((start, *(0 for _ in shape[1:])) if shape else (), sizes), record))
        entries[f"t{number}"] = TensorEntry(f"t{number}", "float32", shape, Chunks.of(chunks))
    return CheckpointIndex(entries, None)


@settings(deadline=None)
@given(chunked(), st.sampled_from([None, "column", "row"]), st.integers(1, 7), st.integers(1, 5))
def test_counted_together_ranks_read_what_they_read_alone(
    index: CheckpointIndex, style: str | None, fsdp: int, tp: int
) -> None:
    rules = None if style is None else TpRules.of({"*": style})
    columns = Columns.of(index, rules)
    for layout in (Layout(fsdp=fsdp, rules=rules), Layout(tp=tp, rules=rules), Layout(fsdp, tp, rules)):
        alone = [count(columns, layout, rank) for rank in range(layout.ranks)]
        assert counts(columns, layout) == alone


def test_a_thousand_ranks_of_a_hundred_thousand_chunks_take_seconds() -> None:
    entries: dict[str, TensorEntry] = {}
    for number in range(12_500):
        chunks = [
            Chunk(
                Box((512 * r, 0), (512, 1024)), Record(f"__{r}_0.distcp", 1_050_000 * number, 1_050_000, ())
            )
            for r in range(8)
        ]
        entries[f"w{number}"] = TensorEntry(f"w{number}", "bfloat16", (4096, 1024), Chunks.of(chunks))
    started = time.process_time()
    columns = Columns.of(CheckpointIndex(entries, None))
    layout = Layout(fsdp=DEFAULT_RANKS[-1])
    reads = counts(columns, layout)
    assert time.process_time() - started < 10
    assert sum(each.needed for each in reads) == 12_500 * 4096 * 1024 * 2
    assert sum(each.torch_reader.requests for each in reads) == 12_500 * 1024
    assert sum(each.torch_reader.bytes for each in reads) == 12_500 * 1024 * 1_050_000


def test_what_would_not_load_is_not_foretold(path: str, tmp_path: Path) -> None:
    broken = save({"w": torch.zeros(1000)}, tmp_path / "step")
    [data] = broken.glob("*.distcp")
    os.truncate(data, 100)
    with pytest.raises(NotLoadableError, match="would not load") as caught:
        forecast(str(broken))
    assert [found.code for found in caught.value.findings] == ["files.truncated"]
    with pytest.raises(UsageError):
        forecast(path, ranks=[])
    with pytest.raises(UsageError, match="1024"):
        forecast(path, ranks=[2048])
