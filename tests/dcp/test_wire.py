"""The interpreter of `.metadata`: what it skips means exactly what running it would; bombs are refused."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp.columns import BoxColumns
from dcp.errors import MetadataError
from dcp.index import CheckpointIndex
from dcp.wire.parser import Parser
from dcp.wire.reader import Loaded, load

Outcome = tuple[Any, ...]
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


def outcome(data: bytes, *, runs: bool) -> tuple[Outcome, Loaded | None]:
    """What reading gives: everything the index says, or how it is refused."""
    loaded = None
    try:
        loaded = load(data, runs=runs)
        index = Parser(loaded, ".metadata").index()
    except MetadataError as error:
        return ("refused", error.code, str(error), error.key, error.detail), loaded
    return ("read", *described(index)), loaded


def described(index: CheckpointIndex) -> Outcome:
    return (list(index.entries.items()), index.paths, index.version, index.save_id, index.unreferenced)


def alike(data: bytes) -> Loaded | None:
    """Read with and without runs, and expect the same."""
    slow, _ = outcome(data, runs=False)
    fast, loaded = outcome(data, runs=True)
    assert fast == slow
    return loaded


def skipped(loaded: Loaded | None) -> int:
    """How many items were skipped."""
    assert loaded is not None
    assert loaded.machine.runs is not None
    return loaded.machine.runs.skipped


NUMBERS = st.one_of(
    st.integers(0, 300),
    st.integers(65_000, 66_000),
    st.sampled_from([255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**40, 2**63 - 1, 2**63, -1, -(2**31) - 1]),
)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8) | st.sampled_from(
    ["w" * 255, "w" * 256]
)


@st.composite
def indices(draw: st.DrawFn) -> Metadata:
    """Indices that vary in all that matters for the encoding: widths, ranks, shared objects, order."""
    described: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    share_files, share_keys = draw(st.booleans()), draw(st.booleans())
    share_sizes, share_offsets = draw(st.booleans()), draw(st.booleans())
    scale = draw(NUMBERS)
    odd = draw(st.integers(0, 30))
    for tensor in range(draw(st.integers(1, 4))):
        key = f"{draw(NAMES)}{tensor}"
        rank = draw(st.integers(0, 5))
        count = draw(st.sampled_from([1, 40, 90, 300]))
        sizes = torch.Size([min(draw(NUMBERS), 2**63 - 1) for _ in range(rank)])
        name = draw(NAMES)
        chunks = []
        for i in range(count):
            offsets = tuple((i * (scale + d)) for d in range(rank)) if rank else ()
            offsets = tuple(min(o, 2**63 - 1) for o in offsets)
            whole = torch.Size(offsets)
            chunks.append(ChunkStorageMetadata(whole, sizes if share_sizes else torch.Size(list(sizes))))
            place = MetadataIndex(key if share_keys else key[:1] + key[1:], whole, i)
            if share_offsets:
                object.__setattr__(place, "offset", whole)
            path = name if share_files else f"{name}{i % 7}_{i // 50}"
            info = _StorageInfo(path, i * scale, scale, ["z"] if odd and i % 31 == odd else None)
            if i % 37 != 36:
                storage[place] = info
        described[key] = TensorStorageMetadata(TensorProperties(torch.float32), sizes, chunks)
        if draw(st.booleans()):
            described[f"{key}.o"] = BytesStorageMetadata()
            storage[MetadataIndex(f"{key}.o")] = _StorageInfo(name, 3, scale)
    if draw(st.booleans()):
        pairs = list(storage.items())
        random.Random(scale).shuffle(pairs)
        storage = dict(pairs)
    return Metadata(described, {}, storage)


@settings(max_examples=60, suppress_health_check=SLOW)
@given(indices(), st.sampled_from([2, 3, 4, 4, 4, 5]))
def test_skipping_means_running(value: Metadata, protocol: int) -> None:
    alike(pickle.dumps(value, protocol=protocol))
    alike(pickle._dumps(value, protocol=protocol))  # type: ignore[attr-defined]


@settings(max_examples=25, suppress_health_check=SLOW)
@given(indices(), st.randoms(use_true_random=False))
def test_skipping_means_running_when_damaged(value: Metadata, rng: random.Random) -> None:
    data = pickle.dumps(value, protocol=4)
    for _ in range(12):
        alike(mutated(data, rng))


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A few random changes: bits, bytes, pieces dropped, doubled or swapped for opcodes."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed))
        match rng.randrange(6):
            case 0:
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                del changed[at : at + rng.randint(1, 40)]
            case 2:
                changed[at:at] = changed[at : at + rng.randint(1, 40)]
            case 3:
                changed[at] = rng.randrange(256)
            case 4:
                changed[at:at] = bytes(
                    rng.choice(b"02()]}elstu\x85\x86\x87\x94hK1aNbR\x81") for _ in range(3)
                )
            case 5:
                # Between two items, where a run would end.
                at = data.find(b"ub", at)
                if 0 < at < len(changed):
                    changed[at + 2 : at + 2] = bytes(rng.choice(b"021(N)]}lte\x94\x85b") for _ in range(2))
        if len(changed) < 2:
            break
    return bytes(changed)


def rows(count: int, keys: int = 3, *, one_file: bool = False) -> Metadata:
    """A plain index: tensors of ``count`` chunks in rows."""
    described: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for key in (f"layers.{i}.weight" for i in range(keys)):
        chunks = [ChunkStorageMetadata(torch.Size([8 * r, 0]), torch.Size([8, 4096])) for r in range(count)]
        described[key] = TensorStorageMetadata(
            TensorProperties(torch.bfloat16), torch.Size([8 * count, 4096]), chunks
        )
        for r, chunk in enumerate(chunks):
            path = "all.distcp" if one_file else f"__{r}_0.distcp"
            storage[MetadataIndex(key, chunk.offsets, r)] = _StorageInfo(path, r * 70000, 65536)
    return Metadata(described, {}, storage)


@pytest.mark.parametrize("one_file", [True, False])
def test_nearly_all_of_a_large_index_is_skipped(one_file: bool) -> None:
    loaded = alike(pickle.dumps(rows(3000, one_file=one_file), protocol=4))
    assert skipped(loaded) > 2 * 9000 * 0.97
    index = Parser(loaded, ".metadata").index() if loaded else None
    assert index is not None
    assert all(isinstance(entry.chunks.boxes, BoxColumns) for entry in index.tensors)


def test_keys_of_every_rank_written_out_are_skipped_too() -> None:
    """As torch writes them: rank by rank, each with copies of the keys, ranks of tensors mixed."""
    described: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for i in range(40):
        key, rest = f"model.layers.{i}.{'w' * (i % 5 + 1)}", [4] * (i % 4)
        chunks = [ChunkStorageMetadata(torch.Size([8 * r, *rest]), torch.Size([8, *rest])) for r in range(70)]
        described[key] = TensorStorageMetadata(
            TensorProperties(torch.float32), torch.Size([8 * 70, *rest]), chunks
        )
    for r in range(70):
        path = f"__{r}_0.distcp"
        for key, tensor in described.items():
            place = MetadataIndex("".join(key), tensor.chunks[r].offsets, r)
            object.__setattr__(place, "fqn", key.encode().decode())
            storage[place] = _StorageInfo(path, 7 * len(storage), 2**31 * (r % 2) + 7)
    loaded = alike(pickle.dumps(Metadata(described, {}, storage), protocol=4))
    assert skipped(loaded) > 2 * 70 * 40 * 0.8


def one_tensor() -> Metadata:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))
    described = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([3]), [chunk])
    place = MetadataIndex("w", torch.Size([0]), 0)
    return Metadata({"w": described}, {}, {place: _StorageInfo("__0_0.distcp", 0, 1000)})


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (b"torch.strided", b"torch.strieed"),
        (b"_MEM_FORMAT_ENCODING\x94\x93\x94K\x00", b"_MEM_FORMAT_ENCODING\x94\x93\x94K\x03"),
        # What stands in the place of the memory format is another value; then there is one value less.
        (b"K\x00\x85\x94R\x94\x89t", b"K\x00\x85\x94\x94\x94\x89t"),
        (b"\x85\x94R\x94\x89t\x94b", b"\x85\x94R\x94\x94t\x94b"),
    ],
)
def test_properties_that_torch_does_not_take_are_damage(was: bytes, now: bytes) -> None:
    whole = pickle.dumps(one_tensor(), protocol=4)
    assert outcome(whole, runs=False)[0][0] == "read"
    assert whole.count(was) == 1
    damaged = whole.replace(was, now)
    with pytest.raises((KeyError, ValueError, RuntimeError)):
        pickle.loads(damaged)
    for runs in (False, True):
        assert outcome(damaged, runs=runs)[0][:2] == ("refused", "metadata.unreadable")


def test_an_attribute_without_a_name_is_damage() -> None:
    damaged = one_tensor()
    next(iter(damaged.storage_data)).__dict__[7] = 7
    refused, _ = outcome(pickle.dumps(damaged), runs=False)
    assert refused[:2] == ("refused", "metadata.unreadable")
    assert "has no name" in refused[2]
