"""Digests of values that all ranks should hold alike: equal ones have equal digests, at a bounded cost.

Up to a limit of bytes a value is hashed whole; of a larger one the same evenly spaced blocks are hashed on
every rank, the ends among them. A tensor is hashed by its elements, whatever its strides and device. An
object is hashed by what its pickle means: which strings happen to be one object in memory, the order of a
dict and the order of a set do not matter.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from dcp.archive import Archive, open_archive
from dcp.errors import CkptError
from dcp.pickles.nodes import Build, Call, Extend, Key, PersistentRef, Update, Value

LIMIT = 1 << 20
"""Bytes hashed of one value."""
_BLOCKS = 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NODE_BYTES = 16
"""What a value inside an object counts beside its text."""
_PICKLE_FACTOR = 4


def digest_of(value: Any, limit: int = LIMIT) -> bytes | None:
    """16 bytes that are the same on ranks that hold the same; None where there is nothing to compare.

    Args:
        value: a tensor that is not sharded, or any object that `torch.save` takes.
        limit: bytes hashed at most.
    """
    if not isinstance(value, torch.Tensor):
        return digest_of_record(_saved(value), limit)
    if value.device.type == "meta":
        return None
    if value.layout != torch.strided or value.is_quantized:
        return digest_of_record(_saved(value), limit)
    found = xxhash.xxh3_128(f"{value.dtype} {list(value.shape)}".encode())
    found.update(_elements(value.detach(), limit))
    return found.digest()


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _elements(tensor: torch.Tensor, limit: int) -> memoryview:
    """Bytes of all elements in C order, or of those that are looked at."""
    if tensor.nbytes > limit:
        tensor = _chosen(tensor, max(_BLOCKS, limit // tensor.itemsize))
    plain = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return memoryview(plain.view(torch.uint8).numpy().data) if plain.numel() else memoryview(b"")


def _chosen(tensor: torch.Tensor, wanted: int) -> torch.Tensor:
    """Evenly spaced blocks of elements, together about ``wanted`` of them."""
    if not tensor.is_conj() and not tensor.is_neg() and tensor.itemsize in _INTEGERS:
        # Few operations are there for every floating type.
        tensor = tensor.view(_INTEGERS[tensor.itemsize])
    length = max(1, wanted // _BLOCKS)
    last = tensor.numel() - length
    starts = [number * last // (_BLOCKS - 1) for number in range(_BLOCKS)]
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        return torch.cat([flat[start : start + length] for start in starts])
    # Flattening a tensor that is not contiguous would copy all of it.
    places = (torch.tensor(starts)[:, None] + torch.arange(length)).reshape(-1).to(tensor.device)
    return tensor[torch.unravel_index(places, tensor.shape)]


def digest_of_record(record: bytes, limit: int = LIMIT) -> bytes:
    """What `digest_of` gives for an object, from what `torch.save` makes of it."""
    try:
        archive = open_archive(record)
        if len(archive.pickle) <= _PICKLE_FACTOR * limit:
            return _Meaning(archive, limit).digest(archive.value)
    except CkptError:
        # Outside the language that is read without running it: only its bytes can be compared.
        return xxhash.xxh3_128_digest(_sampled(memoryview(record), limit))
    return xxhash.xxh3_128_digest(_sampled(memoryview(archive.pickle), limit))


def _sampled(data: memoryview, limit: int) -> bytes:
    """The length and all bytes of ``data``, or evenly spaced blocks of it."""
    size = len(data)
    head = size.to_bytes(8, "little")
    if size <= limit:
        return head + bytes(data)
    length = max(1, limit // _BLOCKS)
    starts = [number * (size - length) // (_BLOCKS - 1) for number in range(_BLOCKS)]
    return head + b"".join(bytes(data[start : start + length]) for start in starts)


class _Meaning:
    """Digests of the values of one pickle, up to ``limit`` bytes of them together."""

    def __init__(self, archive: Archive, limit: int) -> None:
        self.archive = archive
        self.limit = limit
        self.left = limit

    def digest(self, value: Value) -> bytes:
        self.left -= _NODE_BYTES
        if self.left < 0:
            return b"beyond the limit"
        return xxhash.xxh3_128_digest(type(value).__name__.encode() + b"\0" + self._content(value))

    def _content(self, value: Value) -> bytes:
        match value:
            case str() | bytes() | bytearray():
                raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
                self.left -= min(len(raw), self.limit)
                return _sampled(memoryview(raw), self.limit)
            case list() | tuple():
                return b"".join(map(self.digest, value))
            case set() | frozenset():
                return b"".join(sorted(map(self.digest, value)))
            case Mapping():
                return b"".join(sorted(self.digest(k) + self.digest(v) for k, v in value.items()))
            case Key():
                return self.digest(value.value)
            case PersistentRef():
                return self._storage(value.pid)
            case Call():
                steps = [self._step(step) for step in value.then]
                kwargs = self.digest(getattr(value, "kwargs", None))
                return self.digest(value.func) + self.digest(value.args) + kwargs + b"".join(steps)
        # Numbers and names; what is a float stays one to the bit.
        return (value.hex() if isinstance(value, float) else repr(value)).encode()

    def _step(self, step: Extend | Update | Build) -> bytes:
        match step:
            case Extend():
                return b"E" + self.digest(step.items)
            case Update():
                return b"U" + self.digest(dict(enumerate(step.pairs)))
        return b"B" + self.digest(step.state)

    def _storage(self, pid: Value) -> bytes:
        match pid:
            # Its place in the archive and the device it is on differ between ranks that hold the same.
            case ("storage", kind, str(key), _, int(count)):
                content = self.archive.storage(key)
                self.left -= min(len(content), self.limit)
                return self.digest((kind, count)) + _sampled(content, self.limit)
        return repr(pid).encode()
