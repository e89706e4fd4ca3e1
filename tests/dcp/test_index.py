"""The index reader: today's and older files in light types, hostile ones refused without running anything."""

from __future__ import annotations

import copyreg
import enum
import gc
import io
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp.dtypes import ITEMSIZE
from dcp.errors import MetadataError
from dcp.index import ObjectEntry, TensorEntry, merge, parse
from dcp.wire.reader import load
from tests.support.golden import GOLDENS, Golden

WITH_INDEX = [golden for golden in GOLDENS if (golden.directory / ".metadata").exists()]


@pytest.mark.parametrize("golden", WITH_INDEX, ids=lambda golden: golden.name)
def test_says_what_torch_reads(golden: Golden) -> None:
    data = (golden.directory / ".metadata").read_bytes()
    ours, theirs = parse(data), pickle.loads(data)
    assert list(ours.entries) == list(theirs.state_dict_metadata)
    for key, expected in theirs.state_dict_metadata.items():
        entry = ours.entries[key]
        if isinstance(expected, BytesStorageMetadata):
            assert isinstance(entry, ObjectEntry)
            infos = [theirs.storage_data[MetadataIndex(key)]]
            records = [entry.record]
        else:
            assert isinstance(entry, TensorEntry)
            assert entry.shape == tuple(expected.size)
            assert getattr(torch, entry.dtype) == expected.properties.dtype
            boxes = [(tuple(c.offsets), tuple(c.sizes)) for c in expected.chunks]
            assert [(c.box.offsets, c.box.sizes) for c in entry.chunks] == boxes
            infos = [theirs.storage_data[MetadataIndex(key, c.offsets)] for c in expected.chunks]
            records = [c.record for c in entry.chunks]
        for record, info in zip(records, infos, strict=True):
            assert record is not None
            assert (record.path, record.offset, record.length) == (
                info.relative_path,
                info.offset,
                info.length,
            )
            assert record.transforms == tuple(getattr(info, "transform_descriptors", None) or ())
    assert ours.paths == (getattr(theirs, "planner_data", None) or None)
    assert ours.unreferenced == ()


def test_rank_local_indices_join(golden: Callable[[str], Path]) -> None:
    directory = golden("torch_fsdp2_rank_local")
    parts = [(r, parse((directory / f"__{r}.metadata").read_bytes())) for r in (1, 0)]
    merged = merge(parts)
    assert merged.ranks == (0, 1)
    for entry in merged.tensors:
        assert sum(c.box.volume for c in entry.chunks) * ITEMSIZE[entry.dtype] == entry.nbytes


def test_item_sizes_are_torchs() -> None:
    for name, size in ITEMSIZE.items():
        assert getattr(torch, name).itemsize == size, name


def metadata(**fields: Any) -> Metadata:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([4]), [chunk])
    values: dict[str, Any] = {
        "state_dict_metadata": {"w": tensor},
        "planner_data": {"w": ("w",)},
        "storage_data": {MetadataIndex("w", [0], 0): _StorageInfo("__0_0.distcp", 0, 1500)},
        "storage_meta": StorageMeta(checkpoint_id=Path("/x/y"), save_id="abc"),
        **fields,
    }
    return Metadata(**values)


def test_fields_of_older_versions_may_be_missing() -> None:
    value = metadata()
    for name in ("planner_data", "storage_meta", "version"):
        del value.__dict__[name]
    index = parse(pickle.dumps(value))
    assert index.paths is None
    assert index.version is None
    assert index.path_of("w") == ("w",)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_and_older_module_paths(protocol: int) -> None:
    data = pickle.dumps(metadata(), protocol=protocol)
    assert parse(data).checkpoint_id == "/x/y"
    old = data
    if protocol < 4:  # names stand in plain text there, without lengths
        for name in (b"metadata", b"filesystem"):
            old = old.replace(
                b"torch.distributed.checkpoint." + name, b"torch.distributed._shard.checkpoint." + name
            )
        assert old != data
    assert parse(old).entries == parse(data).entries


def test_neither_keys_nor_collector_are_left_changed() -> None:
    assert gc.isenabled()
    parse(pickle.dumps(metadata()))
    assert gc.isenabled()
    with pytest.raises(MetadataError):
        parse(b"junk")
    assert gc.isenabled()


class Runs:
    """Unpickles into a call."""

    def __init__(self, func: Any, *args: Any) -> None:
        self.func, self.args = func, args

    def __reduce__(self) -> Any:
        return self.func, self.args


def planted(target: Path) -> list[Any]:
    touch = f"open({str(target)!r}, 'w').close()"
    inner = pickle.dumps(Runs(exec, touch))
    buffer = io.BytesIO()
    torch.save(Runs(exec, touch), buffer)
    return [
        Runs(exec, touch),
        Runs(os.system, f"touch {target}"),
        Runs(pickle.loads, inner),
        Runs(torch.storage._load_from_bytes, buffer.getvalue()),
        Runs(getattr, "text", "upper"),
        Runs(__import__, "os"),
        Runs(bytearray, 10),
        Runs(copyreg._reconstructor, Metadata, object, None),
        torch.nn.Linear(1, 1),
        torch.zeros(3),
        Runs(io.open, str(target), "w"),
    ]


@pytest.mark.parametrize("place", ["whole", "key", "planner_data", "storage_data", "storage_meta", "version"])
def test_any_other_class_is_named_and_not_run(place: str, tmp_path: Path) -> None:
    target = tmp_path / "planted"
    for bad in planted(target):
        match place:
            case "whole":
                value: Any = bad
            case "key":
                value = metadata(state_dict_metadata={"w": bad})
            case "planner_data":
                value = metadata(planner_data={"w": (bad,)})
            case "storage_data":
                value = metadata(storage_data={MetadataIndex("w", [0]): bad})
            case _:
                value = metadata(**{place: bad})
        with pytest.raises(MetadataError) as raised:
            parse(pickle.dumps(value))
        assert raised.value.code == "metadata.unsafe"
        assert raised.value.detail["global"]
        assert str(raised.value.detail["global"]) in str(raised.value)
        assert not target.exists()


class _ByName(pickle.Pickler):
    """Writes enums as Python 3.11.0 to 3.11.3 do, which Debian 12 has."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_enums_by_name_are_read(protocol: int) -> None:
    file = io.BytesIO()
    _ByName(file, protocol).dump(metadata())
    assert b"getattr" in file.getvalue()
    assert parse(file.getvalue()).entries == parse(pickle.dumps(metadata())).entries


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.Size, "__subclasses__"),
        (Metadata, "__init__"),
        (torch.float32, "itemsize"),
        ("", "format"),
        (Metadata,),
        (Metadata, 1, 2),
        (TensorProperties, 7),
    ],
)
def test_no_other_attribute_is_given(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(MetadataError) as raised:
        parse(pickle.dumps(metadata(planner_data={"w": Runs(getattr, *arguments)})))
    assert raised.value.code == "metadata.unsafe"
    assert raised.value.detail["global"] == "builtins.getattr"


def test_a_pickle_cannot_change_what_later_loads_see() -> None:
    """BUILD on a class, with slot state, would set attributes of the class itself."""
    good = pickle.dumps(metadata())
    for name in ("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata"):
        attack = (
            b"\x80\x02ctorch.distributed.checkpoint.metadata\n" + name.encode() + b"\n"
            b"N}X\x0c\x00\x00\x00__setstate__ctorch\nSize\ns\x86b."
        )
        with pytest.raises(MetadataError):
            parse(attack)
        assert parse(good).entries


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "metadata.empty"),
        (b"\x80", "metadata.unreadable"),
        (b"not a pickle", "metadata.unreadable"),
        (pickle.dumps({"a": 1}), "metadata.unreadable"),
        (pickle.dumps([1, 2]), "metadata.unreadable"),
        (b"\x80\x04\x82\x01.", "metadata.unreadable"),
        (b"\x80\x02Vpid\nQ.", "metadata.unsafe"),
        (b"\x80\x04\x8d" + b"\xff" * 8, "metadata.unreadable"),
        (b"\x80\x04" + b"(" * 100_000 + b".", "metadata.unreadable"),
        (b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".", "metadata.unreadable"),
        (b"\0" * 4096, "metadata.unreadable"),
    ],
)
def test_what_is_no_index_says_so(data: bytes, code: str) -> None:
    with pytest.raises(MetadataError) as raised:
        parse(data)
    assert raised.value.code == code


@pytest.mark.parametrize(
    "fields",
    [
        {"state_dict_metadata": None},
        {"state_dict_metadata": {3: BytesStorageMetadata()}},
        {"state_dict_metadata": {"w": 3}},
        {"state_dict_metadata": {"w": TensorStorageMetadata(TensorProperties(), torch.Size([-1]), [])}},
        {"state_dict_metadata": {"w": TensorStorageMetadata(None, torch.Size([1]), [])}},  # type: ignore[arg-type]
        {"state_dict_metadata": {"w": TensorStorageMetadata(TensorProperties(), torch.Size([1]), [7])}},  # type: ignore[list-item]
        {"storage_data": {MetadataIndex("w", [0]): _StorageInfo(3, 0, 1)}},  # type: ignore[arg-type]
        {"storage_data": {MetadataIndex("w", [0]): _StorageInfo("f", None, 1)}},  # type: ignore[arg-type]
        {"storage_data": {MetadataIndex("w", [0]): _StorageInfo("f", 0, 1, [3])}},  # type: ignore[list-item]
        {"planner_data": {"w": "w"}},
        {"planner_data": {"w": (3.5,)}},
        {"planner_data": {"w": ()}},
    ],
)
def test_malformed_fields_are_unreadable(fields: dict[str, Any]) -> None:
    with pytest.raises(MetadataError) as raised:
        parse(pickle.dumps(metadata(**fields)))
    assert raised.value.code == "metadata.unreadable"


def test_other_storage_plugins_are_unsupported() -> None:
    with pytest.raises(MetadataError) as raised:
        parse(pickle.dumps(metadata(storage_data={"w": "somewhere"})))
    assert raised.value.code == "metadata.unsupported"


def test_mutations_raise_nothing_else() -> None:
    """Any damaged index parses or is a MetadataError; nothing else comes out, nothing hangs."""
    rng = random.Random(7)
    seeds = [(g.directory / ".metadata").read_bytes() for g in WITH_INDEX[:6]]
    refused = 0
    for _ in range(3000):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] ^= 1 << rng.randrange(8)
                case 1:
                    del data[at : at + rng.randint(1, 40)]
                case 2:
                    data[at:at] = data[at : at + rng.randint(1, 40)]
                case 3:
                    data[at] = rng.randrange(256)
            if not data:
                break
        try:
            parse(bytes(data))
        except MetadataError:
            refused += 1
    assert refused > 1000


def test_nothing_is_imported_for_it() -> None:
    import subprocess
    import sys

    path = WITH_INDEX[0].directory / ".metadata"
    code = (
        "import sys; from dcp.index import parse\n"
        f"parse(open({str(path)!r}, 'rb').read())\n"
        "assert not {'torch', 'numpy', 'prefect'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_stand_ins_hold_what_the_pickle_says() -> None:
    assert load(pickle.dumps(metadata(version="9"))).metadata.fields["version"] == "9"
