"""Records: every golden's chunks assembled equal their expected tensors; damage is named with its place."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dcp.checkpoint import Checkpoint, open_checkpoint
from dcp.dtypes import ITEMSIZE
from dcp.errors import CheckpointError, RecordError
from dcp.index import Chunk, TensorEntry
from dcp.records import Records
from dcp.zip_entries import all_entries, front_entries
from tests.support.golden import GOLDENS, Golden

READABLE = [g for g in GOLDENS if g.expected and g.name not in ("torch_hf_sharded", "torch_objects")]


def assembled(checkpoint: Checkpoint, entry: TensorEntry) -> bytes:
    """The whole tensor in C order, from its chunks."""
    records = Records(checkpoint.store, checkpoint.objects)
    item = ITEMSIZE[entry.dtype]
    target = np.zeros((*entry.shape, item), np.uint8)
    for chunk in entry.chunks:
        data = np.frombuffer(records.read_chunk(entry, chunk), np.uint8).reshape(*chunk.box.sizes, item)
        region = tuple(slice(o, e) for o, e in zip(chunk.box.offsets, chunk.box.ends, strict=True))
        target[region] = data
    return target.tobytes()


def content(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


@pytest.mark.parametrize("golden", READABLE, ids=lambda golden: golden.name)
def test_chunks_hold_the_expected_values(golden: Golden) -> None:
    checkpoint = open_checkpoint(str(golden.directory))
    expected: dict[str, Any] = torch.load(golden.expected, weights_only=False)
    compared = 0
    for entry in checkpoint.index.tensors:
        if entry.key in expected:
            assert assembled(checkpoint, entry) == content(expected[entry.key]), entry.key
            compared += 1
    assert compared == sum(isinstance(value, torch.Tensor) for value in expected.values()) > 0


def test_rows_of_a_chunk_are_one_byte_range(golden: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(str(golden("torch_fsdp_tp_2x2")))
    records = Records(checkpoint.store, checkpoint.objects)
    for entry, chunk in chunks(checkpoint):
        located = records.locate(entry, chunk)
        assert located.direct
        assert located.checkable or not located.nbytes
        whole = records.read_chunk(entry, chunk)
        if chunk.box.sizes and chunk.box.sizes[0] > 1:
            item = located.rows(1, 2)
            data = checkpoint.store.read_range(item.name, item.start, item.end)
            assert data == whole[located.row_bytes : 2 * located.row_bytes]


def chunks(checkpoint: Checkpoint) -> Iterator[tuple[TensorEntry, Chunk]]:
    return ((entry, chunk) for entry in checkpoint.index.tensors for chunk in entry.chunks)


def test_one_flipped_bit_is_corrupt_and_named(golden_copy: Callable[[str], Path]) -> None:
    directory = golden_copy("torch_fsdp2_zstd")
    plain = golden_copy("torch_fsdp_tp_2x2")
    for place in (directory, plain):
        checkpoint = open_checkpoint(str(place))
        records = Records(checkpoint.store, checkpoint.objects)
        entry, chunk = max(chunks(checkpoint), key=lambda pair: pair[1].box.volume)
        record = chunk.record
        assert record is not None
        located = records.locate(entry, chunk)
        at = located.start + 5 if located.direct else record.offset + record.length // 2
        file = place / record.path
        data = bytearray(file.read_bytes())
        data[at] ^= 4
        file.write_bytes(data)
        with pytest.raises(RecordError) as raised:
            records.read_chunk(entry, chunk)
        assert raised.value.code == "records.corrupt"
        assert (raised.value.key, raised.value.file) == (entry.key, record.path)
        assert raised.value.detail["offset"] == record.offset


def test_a_wrapper_subclass_is_undecodable(golden: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(str(golden("torch_torchao")))
    records = Records(checkpoint.store, checkpoint.objects)
    codes = {}
    for entry, chunk in chunks(checkpoint):
        try:
            records.read_chunk(entry, chunk)
        except RecordError as error:
            codes[entry.key] = error.code
    assert codes == {"model.0.weight": "records.undecodable", "model.1.weight": "records.undecodable"}


def save_one(directory: Path, tensor: torch.Tensor, **writer: Any) -> Checkpoint:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"t": tensor}, storage_writer=FileSystemWriter(directory, **writer), no_dist=True)
    return open_checkpoint(str(directory))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(24.0).reshape(4, 6).T,
        lambda: torch.arange(24.0).reshape(4, 6)[:, ::2],
        lambda: torch.arange(10.0)[3:7],
        lambda: torch.ones(3).expand(5, 3),
        lambda: torch.complex(torch.randn(5), torch.randn(5)).conj(),
        lambda: torch.complex(torch.randn(5), torch.tensor([0.0, -0.0, float("nan"), 1, 2])).conj().imag,
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.nn.Parameter(torch.randn(3, 3)),
        lambda: torch.randn(3).to(torch.float8_e4m3fn),
        lambda: torch.tensor(3, dtype=torch.uint16),
        lambda: torch.zeros(0, 5),
    ],
)
def test_every_kind_of_tensor_torch_saves(make: Callable[[], torch.Tensor], tmp_path: Path) -> None:
    tensor = make()
    checkpoint = save_one(tmp_path / "c", tensor)
    (entry,) = checkpoint.index.tensors
    assert assembled(checkpoint, entry) == content(tensor)


def test_records_without_crc_are_read_and_said_to_be_unchecked(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        checkpoint = save_one(tmp_path / "c", torch.arange(1000.0))
    finally:
        torch.serialization.set_crc32_options(True)
    records = Records(checkpoint.store, checkpoint.objects)
    ((entry, chunk),) = chunks(checkpoint)
    assert not records.locate(entry, chunk).checkable
    assert assembled(checkpoint, entry) == content(torch.arange(1000.0))


def test_sizes_in_files_are_not_trusted(tmp_path: Path) -> None:
    checkpoint = save_one(tmp_path / "c", torch.arange(1000.0))
    ((entry, chunk),) = chunks(checkpoint)
    record = chunk.record
    assert record is not None
    file = tmp_path / "c" / record.path
    good = file.read_bytes()
    for data in (b"", good[:100], good[:700], good[:-3000], b"\0" * len(good), b"PK\x03\x04" * 1000):
        file.write_bytes(data)
        fresh = open_checkpoint(str(tmp_path / "c"))
        with pytest.raises(CheckpointError):
            Records(fresh.store, fresh.objects).read_chunk(entry, chunk)


def test_archive_entries_from_both_ends_agree() -> None:
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(10.0), "b": torch.zeros(3)}, buffer)
    data = buffer.getvalue()
    assert {entry.name: entry for entry in front_entries(data)} == all_entries(data)


def test_objects_are_archives(golden: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(str(golden("torch_fsdp_tp_2x2")))
    records = Records(checkpoint.store, checkpoint.objects)
    values = {entry.key: records.read_object(entry).value for entry in checkpoint.index.objects}
    assert values["optim.param_groups.0.amsgrad"] is False
