"""Safetensors files, read by their header alone and without trusting it.

torch can write a whole `.distcp` as one safetensors file; the index then says where nothing stands, and
the file's own header does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from dcp.dtypes import ITEMSIZE
from dcp.errors import RecordError
from dcp.storage import ObjectInfo, Store

HEADER_LIMIT = 100 << 20
"""Largest header accepted, in bytes; the reference implementation has the same bound."""

DTYPE_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
"""Safetensors' names of element types to torch's."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a safetensors file. Bytes ``start <= i < end`` of the object are it in C order."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def is_safetensors(store: Store, info: ObjectInfo, offset: int = 0) -> bool:
    """Whether a safetensors file begins at byte ``offset`` of the object."""
    if offset < 0 or offset + 10 > info.size:
        return False
    head = store.read_range(info.name, offset, offset + 10)
    return looks_like_safetensors(head, info.size - offset)


def looks_like_safetensors(head: bytes, size: int) -> bool:
    """Whether at least nine bytes begin a safetensors file of ``size`` bytes."""
    length = int.from_bytes(head[:8], "little")
    return len(head) > 8 and 2 <= length <= min(HEADER_LIMIT, size - 8) and head[8:9] == b"{"


def read_header(
    store: Store, info: ObjectInfo, offset: int = 0
) -> tuple[dict[str, Stored], Mapping[str, str]]:
    """Tensors by name, and the free metadata, of the safetensors file at byte ``offset`` of an object.

    Raises:
        RecordError: the header is not valid, or places a tensor outside the object.
    """
    if not is_safetensors(store, info, offset):
        raise RecordError(f"{info.name} holds no safetensors header at byte {offset}", file=info.name)
    length = int.from_bytes(store.read_range(info.name, offset, offset + 8), "little")
    try:
        header = json.loads(store.read_range(info.name, offset + 8, offset + 8 + length))
    except (ValueError, RecursionError) as error:
        raise RecordError(
            f"the safetensors header of {info.name} is not JSON: {error}", file=info.name
        ) from None
    base = offset + 8 + length
    if not isinstance(header, dict):
        raise RecordError(f"the safetensors header of {info.name} is not an object", file=info.name)
    metadata = header.pop("__metadata__", {})
    tensors = {name: _stored(info, name, entry, base) for name, entry in header.items()}
    return tensors, metadata if isinstance(metadata, dict) else {}


def _stored(info: ObjectInfo, name: str, entry: object, base: int) -> Stored:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(first), int(last)]} if (
            dtype in DTYPE_NAMES and all(type(n) is int and n >= 0 for n in shape)
        ):
            stored = Stored(DTYPE_NAMES[dtype], tuple(shape), base + first, base + last)
        case _:
            raise RecordError(f"{info.name}: the entry of {name} is malformed", key=name, file=info.name)
    expected = ITEMSIZE[stored.dtype]
    for n in stored.shape:
        expected *= n
    if first < 0 or last - first != expected or stored.end > info.size:
        raise RecordError(
            f"{info.name}: {name} should take {expected} bytes, its entry gives {first} to {last} "
            f"of an object of {info.size}",
            key=name,
            file=info.name,
            offset=stored.start,
            expected=expected,
            actual=last - first,
        )
    return stored
