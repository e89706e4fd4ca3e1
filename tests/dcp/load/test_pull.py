"""`Pull` gets what is needed: joined requests, CRCs along the way, one failure apart from the rest."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dcp.archive import Archive
from dcp.boxes import Box, whole
from dcp.checkpoint import Checkpoint, open_checkpoint
from dcp.errors import CheckpointError, UsageError
from dcp.index import Chunk, TensorEntry
from dcp.load.needs import ChunkNeed, Need, ObjectNeed
from dcp.load.pull import Pull
from dcp.load.regions import spans
from dcp.load.requests import SMALL, TINY
from dcp.load.source import Metered, Remembering
from dcp.storage import ByteRange
from tests.dcp.load.expectations import save


def needs_of(entry: TensorEntry, chunk: Chunk, region: Box, limit: int = 1 << 30) -> list[Need]:
    found = spans(region, chunk.box.sizes, 4, gap=0, limit=limit)
    return [ChunkNeed(entry, chunk, span) for span in found]


def only(checkpoint: Checkpoint, key: str) -> tuple[TensorEntry, Chunk]:
    entry = checkpoint.index.entries[key]
    assert isinstance(entry, TensorEntry)
    [chunk] = entry.chunks
    return entry, chunk


@pytest.fixture
def mixed(tmp_path: Path) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
    """Tensors around the sizes at which reading changes, and an object."""
    rows = {"tiny": TINY // 8, "small": SMALL // 8, "large": SMALL}
    values = {k: torch.arange(n // 4, dtype=torch.int32).reshape(-1, 16) for k, n in rows.items()}
    return open_checkpoint(str(save({**values, "o": {"a": 1}}, tmp_path / "step"))), values


@pytest.mark.parametrize("limit", [1 << 12, 1 << 17, 1 << 30])
@pytest.mark.parametrize("key", ["tiny", "small", "large"])
def test_pieces_are_the_tensor(
    mixed: tuple[Checkpoint, dict[str, torch.Tensor]], key: str, limit: int
) -> None:
    checkpoint, values = mixed
    entry, chunk = only(checkpoint, key)
    needs = needs_of(entry, chunk, whole(entry.shape), limit)
    got = [bits for _, group in Pull(checkpoint).groups([need] for need in needs) for bits in group]
    assert np.array_equal(np.concatenate(got), values[key].numpy().view(np.uint32))


def test_neighbours_are_one_request(mixed: tuple[Checkpoint, dict[str, torch.Tensor]]) -> None:
    checkpoint, _ = mixed
    pairs = [only(checkpoint, key) for key in ("tiny", "small")]
    needs: list[Need] = [need for e, c in pairs for need in needs_of(e, c, whole(e.shape))]
    needs += [ObjectNeed(entry) for entry in checkpoint.index.objects]
    pull = Pull(checkpoint)
    [(_, got)] = pull.groups([needs])
    assert len(got) == 3
    assert isinstance(got[2], Archive)
    records = [need.record for need in needs]
    span = max(r.end for r in records if r) - min(r.offset for r in records if r)
    assert (pull.source.requests, pull.source.bytes_read) == (1, span)


def test_a_damaged_chunk_spoils_no_other(mixed: tuple[Checkpoint, dict[str, torch.Tensor]]) -> None:
    checkpoint, _ = mixed
    pairs = {key: only(checkpoint, key) for key in ("tiny", "small", "large")}
    for key in ("tiny", "large"):
        record = pairs[key][1].record
        assert record is not None
        path = Path(checkpoint.url) / record.path
        content = bytearray(path.read_bytes())
        content[record.offset + record.length // 2] ^= 1
        path.write_bytes(content)
    needs = [
        n for entry, chunk in pairs.values() for n in needs_of(entry, chunk, whole(entry.shape), 1 << 18)
    ]
    [(_, got)] = Pull(checkpoint).groups([needs])
    bad = [n.entry.key for n, value in zip(needs, got, strict=True) if isinstance(value, CheckpointError)]
    assert bad == ["tiny", "large"]
    # The CRC of a chunk in pieces is known with its last piece alone.
    assert isinstance(got[-1], CheckpointError)
    assert got[-1].code == "records.corrupt"


def test_a_part_of_a_chunk_has_no_crc_to_check(mixed: tuple[Checkpoint, dict[str, torch.Tensor]]) -> None:
    checkpoint, values = mixed
    entry, chunk = only(checkpoint, "large")
    [need] = needs_of(entry, chunk, Box((10, 0), (20, 16)))
    [(_, [got])] = Pull(checkpoint).groups([[need]])
    assert np.array_equal(np.asarray(got), values["large"][10:30].numpy().view(np.uint32))


def test_groups_without_requests_keep_their_turn(golden: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(str(golden("torch_exotic_2rank")))
    everything: list[list[Need]] = [
        [ObjectNeed(entry) for entry in checkpoint.index.objects] for _ in range(3)
    ]
    entry = next(entry for entry in checkpoint.index.tensors if entry.nbytes)
    some = needs_of(entry, entry.chunks[0], whole(entry.chunks[0].box.sizes))
    groups = [everything[0], some, everything[1], everything[2]]
    assert [list(needs) for needs, _ in Pull(checkpoint).groups(groups)] == groups


def test_views_of_a_store_only_read(golden: Callable[[str], Path]) -> None:
    store = open_checkpoint(str(golden("torch_tied"))).store
    view = Metered(store)
    name = view.objects()[0].name
    for write in (
        lambda: view.create(name, b""),
        lambda: view.replace(name, b""),
        lambda: view.writer(name),
        lambda: view.remove(name),
    ):
        with pytest.raises(UsageError, match="opened for reading"):
            write()
    assert (view.info(name), view.exists(name)) == (store.info(name), True)


def test_memory_answers_only_for_what_it_holds(golden: Callable[[str], Path]) -> None:
    store = Metered(open_checkpoint(str(golden("torch_tied"))).store)
    memory = Remembering(store)
    memory.hold([(ByteRange(".metadata", 10, 14), b"held")])
    assert memory.read_range(".metadata", 11, 13) == b"el"
    assert store.requests == 0
    assert memory.read_range(".metadata", 0, 12) == store.inner.read_range(".metadata", 0, 12)
    assert (store.requests, store.bytes_read) == (1, 12)
