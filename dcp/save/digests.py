"""Digests of values that all ranks should hold alike: equal ones have equal digests, at a bounded cost.

Up to a limit of bytes a tensor is hashed whole, piece by piece; of a larger one the same evenly spaced blocks
are hashed on every rank, the ends among them. A tensor is hashed by its elements, whatever its strides and
device. An object is hashed by what its pickle means: which strings happen to be one object in memory, the
order of a dict and the order of a set do not matter. Working that out takes far longer than hashing, so it
has a limit of its own.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

from dcp.archive import Archive, open_archive
from dcp.errors import CkptError
from dcp.pickles.nodes import Build, Call, Extend, Key, PersistentRef, Update, Value

LIMIT = 1 << 30
"""Bytes hashed of one value, at 10 to 15 GiB a second on one core."""
MEANING = 1 << 20
"""The same for what a pickle means beside the bytes of its tensors, at a few MiB a second."""
_PIECE = 16 << 20
"""Bytes of a tensor that are fetched from its device, or copied in C order, at a time."""
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
    value = value.detach()
    for part in [value] if value.nbytes <= limit else _chosen(value, limit):
        for piece in _pieces(part):
            found.update(_elements(piece))
    return found.digest()


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _elements(tensor: torch.Tensor) -> memoryview:
    """Bytes of all elements in C order."""
    plain = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return memoryview(plain.view(torch.uint8).numpy().data) if plain.numel() else memoryview(b"")


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Parts of a tensor in C order, of at most `_PIECE` unless a single element is more."""
    if tensor.nbytes <= _PIECE or not tensor.dim():
        yield tensor
        return
    rows = _PIECE * tensor.shape[0] // tensor.nbytes
    if rows:
        yield from torch.split(tensor, rows)
    else:
        for row in tensor:
            yield from _pieces(row)


def _chosen(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Evenly spaced blocks of elements, together about ``limit`` bytes."""
    if not tensor.is_conj() and not tensor.is_neg() and tensor.itemsize in _INTEGERS:
        # Few operations are there for every floating type.
        tensor = tensor.view(_INTEGERS[tensor.itemsize])
    length = max(1, limit // tensor.itemsize // _BLOCKS)
    last = tensor.numel() - length
    for number in range(_BLOCKS):
        start = number * last // (_BLOCKS - 1)
        if tensor.is_contiguous():
            yield tensor.view(-1)[start : start + length]
        else:
            # Flattening a tensor that is not contiguous would copy all of it.
            places = torch.arange(start, start + length, device=tensor.device)
            yield tensor[torch.unravel_index(places, tensor.shape)]


def digest_of_record(record: bytes, limit: int = LIMIT) -> bytes:
    """What `digest_of` gives for an object, from what `torch.save` makes of it."""
    readable = min(limit, MEANING)
    try:
        archive = open_archive(record)
        if len(archive.pickle) <= _PICKLE_FACTOR * readable:
            return _Meaning(archive, limit).digest(archive.value)
    except CkptError:
        # Outside the language that is read without running it: only its bytes can be compared.
        pass
    return _sampled(memoryview(record), readable)


def _sampled(data: memoryview, limit: int) -> bytes:
    """Digest of the length and all bytes of ``data``, or of evenly spaced blocks of it."""
    size = len(data)
    found = xxhash.xxh3_128(size.to_bytes(8, "little"))
    if size <= limit:
        found.update(data)
    else:
        length = max(1, limit // _BLOCKS)
        for number in range(_BLOCKS):
            start = number * (size - length) // (_BLOCKS - 1)
            found.update(data[start : start + length])
    return found.digest()


class _Meaning:
    """Digests of the values of one pickle, up to ``limit`` bytes of them together, and to `MEANING` of what
    is no tensor's.
    """

    def __init__(self, archive: Archive, limit: int) -> None:
        self.archive = archive
        self.limit = limit
        self.left = min(limit, MEANING)
        self.left_of_tensors = limit

    def digest(self, value: Value) -> bytes:
        self.left -= _NODE_BYTES
        if self.left < 0:
            return b"beyond the limit"
        return xxhash.xxh3_128_digest(type(value).__name__.encode() + b"\0" + self._content(value))

    def _content(self, value: Value) -> bytes:
        match value:
            case str() | bytes() | bytearray():
                raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
                limit = min(self.limit, MEANING)
                self.left -= min(len(raw), limit)
                return _sampled(memoryview(raw), limit)
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
                limit = max(1, self.left_of_tensors)
                self.left_of_tensors -= min(len(content), limit)
                return self.digest((kind, count)) + _sampled(content, limit)
        return repr(pid).encode()
