"""Indices in columns are judged exactly as the same indices in plain objects."""

from __future__ import annotations

import pickle
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp.boxes import Box, check_tiling
from dcp.checkpoint import Checkpoint
from dcp.checks.files import check_files
from dcp.checks.tiling import check_tensor
from dcp.columns import BoxColumns, RecordColumns
from dcp.findings import Finding
from dcp.index import CheckpointIndex, Chunks
from dcp.record import Record
from dcp.storage import ObjectInfo, open_store
from dcp.wire.parser import Parser
from dcp.wire.reader import load

SIZE = 100_000
FILES = ("__0_0.distcp", "__1_0.distcp", "__2_0.distcp")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("step")
    for name in FILES:
        with (directory / name).open("wb") as file:
            file.truncate(SIZE)
    return directory


def grid(across: int, down: int, *, split: bool) -> tuple[list[Any], dict[Any, Any]]:
    """Chunks of a (8 * down, 4 * across) tensor, and their storage entries back to back in three files."""
    chunks: list[Any] = []
    storage: dict[Any, Any] = {}
    ends = dict.fromkeys(FILES, 0)
    for i in range(down):
        for j in range(across if split else 1):
            sizes = torch.Size([8, 4 if split else 4 * across])
            chunk = ChunkStorageMetadata(torch.Size([8 * i, 4 * j]), sizes)
            chunks.append(chunk)
            name, length = FILES[len(chunks) % 3], 4 * sizes.numel()
            storage[MetadataIndex("w", chunk.offsets, len(chunks) - 1)] = _StorageInfo(
                name, ends[name], length
            )
            ends[name] += length
    return chunks, storage


@st.composite
def damaged(draw: st.DrawFn) -> Metadata:
    down, across = draw(st.integers(24, 90)), draw(st.integers(3, 4))
    chunks, storage = grid(across, down, split=draw(st.booleans()))
    places = list(storage)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(chunks) - 1))
        place = places[at % len(places)]
        number = draw(st.sampled_from([-1, 0, 1, 3, 5, 8, 300, SIZE, 2**31, 2**62, 2**63 - 1]))
        match draw(
            st.sampled_from(["drop", "move", "grow", "double", "rank", "lose", "offset", "length", "file"])
        ):
            case "drop":
                del chunks[at]
            case "move":
                offsets = list(chunks[at].offsets)
                offsets[-1] = number
                chunks[at] = ChunkStorageMetadata(torch.Size(offsets), chunks[at].sizes)
            case "grow":
                sizes = list(chunks[at].sizes)
                sizes[0] = number
                chunks[at] = ChunkStorageMetadata(chunks[at].offsets, torch.Size(sizes))
            case "double":
                chunks.insert(draw(st.integers(0, len(chunks))), chunks[at])
            case "rank":
                chunks[at] = ChunkStorageMetadata(torch.Size([number]), torch.Size([1]))
            case "lose":
                storage.pop(place, None)
            case "offset" if place in storage:
                storage[place] = _StorageInfo(storage[place].relative_path, number, storage[place].length)
            case "length" if place in storage:
                storage[place] = _StorageInfo(storage[place].relative_path, storage[place].offset, number)
            case "file" if place in storage:
                name = draw(st.sampled_from([*FILES, "gone.distcp", "../up"]))
                storage[place] = _StorageInfo(name, storage[place].offset, storage[place].length)
    shape = torch.Size([8 * down, 4 * across])
    if draw(st.booleans()):
        storage = dict(reversed(storage.items()))
    return Metadata(
        {"w": TensorStorageMetadata(TensorProperties(torch.float32), shape, chunks)}, None, storage
    )


def read(data: bytes, *, runs: bool) -> CheckpointIndex:
    return Parser(load(data, runs=runs), ".metadata").index()


def judged(index: CheckpointIndex, directory: Path) -> list[Finding]:
    objects = {name: ObjectInfo(name, SIZE, 1.0, "x") for name in FILES}
    objects[".metadata"] = ObjectInfo(".metadata", 1, 1.0, "x")
    checkpoint = Checkpoint(open_store(str(directory)), objects, index, (".metadata",), "")
    return [
        *check_files(checkpoint, newer_seconds=300, copied=False),
        *chain.from_iterable(map(check_tensor, index.tensors)),
    ]


@settings(max_examples=150)
@given(damaged())
def test_findings_are_the_same(files: Path, value: Metadata) -> None:
    data = pickle.dumps(value, protocol=4)
    plain, columns = read(data, runs=False), read(data, runs=True)
    assert columns.entries == plain.entries
    assert plain.entries == columns.entries
    assert columns.files() == plain.files()
    assert judged(columns, files) == judged(plain, files)


@pytest.mark.parametrize("split", [True, False])
def test_a_whole_index_stays_in_columns(files: Path, split: bool) -> None:
    chunks, storage = grid(4, 90, split=split)
    shape = torch.Size([8 * 90, 16])
    value = Metadata(
        {"w": TensorStorageMetadata(TensorProperties(torch.float32), shape, chunks)}, None, storage
    )
    index = read(pickle.dumps(value, protocol=4), runs=True)
    held = index.tensors[0].chunks
    assert isinstance(held.boxes, BoxColumns)
    assert isinstance(held.records, RecordColumns)
    assert judged(index, files) == []
    assert check_tiling(index.tensors[0].shape, held.boxes).ok
    assert not check_tiling(index.tensors[0].shape, held.boxes[1:]).ok


def test_columns_are_sequences_like_tuples() -> None:
    import numpy as np

    boxes = tuple(Box((i, 0), (1, 4)) for i in range(5000))
    records = tuple(None if i % 7 == 3 else Record("ab"[i % 2], i, 9, ("z",) * (i % 2)) for i in range(5000))
    columns = Chunks(
        BoxColumns(np.array([b.offsets for b in boxes]), np.array([b.sizes for b in boxes])),
        RecordColumns(
            [("a", ()), ("b", ("z",))],
            np.array([-1 if r is None else "ab".index(r.path) for r in records], np.int32),
            np.array([0 if r is None else r.offset for r in records]),
            np.array([0 if r is None else r.length for r in records]),
        ),
    )
    plain = Chunks(boxes, records)
    assert columns == plain
    assert plain == columns
    assert hash(columns) == hash(plain)
    assert list(columns) == list(plain)
    assert columns[4999] == plain[4999]
    assert columns[-2] == plain[-2]
    assert columns[10:4990:3] == plain[10:4990:3]
    assert Chunks.of(columns) == plain
    assert columns[1:] != plain[:-1]
    assert pickle.loads(pickle.dumps(columns)) == plain
