"""Records of tensor subclasses, as quantized weights: intact, and yet no plain tensor's bytes.

Such a record holds what the class was made of. Its size says nothing of the shape in the index, so it must
not be taken for one that was cut off; nor can it be read as the tensor without running the class.
"""

from __future__ import annotations

from dcp.errors import CheckpointError
from dcp.findings import Finding, finding
from dcp.index import ObjectEntry, TensorEntry
from dcp.pickles.nodes import Reduce
from dcp.records import Records

_MAKERS = {"torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_wrapper_subclass"}


def is_subclass(records: Records, entry: TensorEntry) -> bool:
    """Whether every record of a tensor is a whole archive, its CRCs right, of an instance of a subclass.

    Raises:
        StorageError: the store failed.
    """
    return len(entry.chunks) > 0 and all(
        chunk.record is not None and _holds_subclass(records, ObjectEntry(entry.key, chunk.record))
        for chunk in entry.chunks
    )


def _holds_subclass(records: Records, entry: ObjectEntry) -> bool:
    try:
        value = records.read_object(entry).value
    except CheckpointError:
        return False
    return isinstance(value, Reduce) and str(value.func) in _MAKERS


def unchecked(entry: TensorEntry) -> Finding:
    """What a check says of such a tensor."""
    return finding(
        "records.unchecked",
        f"{entry.key} is a tensor of a class of its own, as quantized weights are: its archive is whole, "
        f"what the class makes of it was not checked",
        key=entry.key,
        severity="warning",
    )
