"""Records of tensor subclasses and quantized tensors: intact, and yet no plain tensor's bytes.

Such a record holds what the tensor was made of. Its size says nothing of the shape in the index, so it must
not be taken for one that was cut off; nor can it be read as the tensor without running its class.
"""

from __future__ import annotations

from dcp.archive import Archive
from dcp.checks.tiling import short_records
from dcp.errors import CheckpointError
from dcp.findings import Finding, finding
from dcp.index import ObjectEntry, TensorEntry
from dcp.pickles.nodes import Reduce
from dcp.record import Record
from dcp.records import Records

_MAKERS = {
    "torch._tensor._rebuild_from_type_v2",
    "torch._utils._rebuild_wrapper_subclass",
    "torch._utils._rebuild_qtensor",
}


def is_subclass(records: Records, entry: TensorEntry) -> bool:
    """Whether every record of a tensor is a whole archive, its CRCs right, of an instance of a subclass.

    Raises:
        StorageError: the store failed.
    """
    return len(entry.chunks) > 0 and all(
        subclass_archive(records, entry.key, chunk.record) is not None for chunk in entry.chunks
    )


def looks_like_subclass(records: Records, entry: TensorEntry) -> bool:
    """As `is_subclass`, at no cost for tensors whose records are as long as plain ones."""
    suspicious = entry.dtype.startswith("q") or any(True for _ in short_records(entry))
    return suspicious and is_subclass(records, entry)


def subclass_archive(records: Records, key: str, record: Record | None) -> Archive | None:
    """The record of a chunk, if it is a whole archive of an instance of a subclass."""
    if record is None:
        return None
    try:
        archive = records.read_object(ObjectEntry(key, record))
    except CheckpointError:
        return None
    return archive if isinstance(archive.value, Reduce) and str(archive.value.func) in _MAKERS else None


def damage_of(records: Records, key: str, record: Record | None) -> CheckpointError | None:
    """What is wrong with the bytes of a record that is no plain tensor's, if they are not what was written.

    Raises:
        StorageError: the store failed.
    """
    if record is None:
        return None
    try:
        records.read_object(ObjectEntry(key, record))
    except CheckpointError as error:
        return error if error.code == "records.corrupt" else None
    return None


def unchecked(entry: TensorEntry) -> Finding:
    """What a check says of such a tensor."""
    return finding(
        "records.unchecked",
        f"{entry.key} is a tensor of a class of its own, as quantized weights are: its archive is whole, "
        f"what the class makes of it was not checked",
        key=entry.key,
        severity="warning",
    )
