"""The layout of safetensors output: which tensors stand in which file, and every file's header. Pure values.

Tensors are spread over files in their own order, as much in each as `max_shard_size` takes; within a file
wider types stand first, so that every tensor is aligned. The index names each tensor's file, as Hugging
Face's loaders read it. Exports of different content can be told apart by their names: see `tagged`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dcp.dtypes import ITEMSIZE
from dcp.errors import UsageError
from dcp.exporting.tensor_stream import OutTensor
from dcp.safetensors_file import DTYPE_NAMES, HEADER_LIMIT, Stored

MAX_SHARD_SIZE = 5_000_000_000
"""Default for the bytes of tensors in one file."""
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
"""A model in one file: where it stands, Hugging Face's loaders do not look for an index."""
SUFFIX = ".safetensors"

_NAMES = {torch_name: name for name, torch_name in DTYPE_NAMES.items()}
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class Shard:
    """One file: ``header``, then the bytes of ``tensors`` in order, ``size`` bytes in all."""

    name: str
    header: bytes
    tensors: tuple[OutTensor, ...]
    size: int

    def stored(self) -> dict[str, Stored]:
        """What a reader of the header finds."""
        return {
            tensor.name: Stored(tensor.dtype, tensor.entry.shape, start, start + tensor.nbytes)
            for tensor, start in _placed(self.tensors, len(self.header))
        }


def holds(dtype: str) -> bool:
    """Whether safetensors has the element type."""
    return dtype in _NAMES


def split(
    tensors: Sequence[OutTensor], *, name: str, max_shard_size: int, metadata: Mapping[str, str]
) -> list[Shard]:
    """Spread tensors over files.

    Args:
        tensors: in the order in which they fill the files.
        name: one file, if it ends in ``.safetensors``, or the directory of several.
        max_shard_size: bytes of tensors in a file; a larger tensor has a file of its own.
        metadata: the free text in each header.

    Raises:
        UsageError: one file is asked for and would be larger, two tensors have one name, or a name cannot
            stand in a header.
    """
    _check_names(tensors)
    groups: list[list[OutTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.nbytes > max_shard_size:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    if not name.endswith(SUFFIX):
        count = len(groups)
        return [
            _shard(f"{name}/model-{number:05}-of-{count:05}{SUFFIX}", group, metadata)
            for number, group in enumerate(groups, 1)
        ]
    if len(groups) > 1:
        total = sum(tensor.nbytes for tensor in tensors)
        raise UsageError(
            f"{name} would hold {total} bytes, more than one file may ({max_shard_size}); "
            f"name a directory, or raise --max-shard-size"
        )
    return [_shard(name, groups[0], metadata)]


def index_of(shards: Sequence[Shard], metadata: Mapping[str, str]) -> bytes:
    """The content of the index; ``metadata`` is that of the headers. Equal ones lead to equal bytes."""
    held = [(tensor, shard) for shard in shards for tensor in shard.tensors]
    document = {
        "metadata": {
            "total_size": sum(tensor.nbytes for tensor, _ in held),
            **metadata,
            "content": _digest(shards),
        },
        "weight_map": {tensor.name: shard.name.rpartition("/")[2] for tensor, shard in held},
    }
    return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def tagged(shards: Sequence[Shard]) -> list[Shard]:
    """The shards of a directory under names that those of no other content have."""
    directory, tag, count = shards[0].name.rpartition("/")[0], _digest(shards)[:8], len(shards)
    return [
        replace(shard, name=f"{directory}/model-{tag}-{number:05}-of-{count:05}{SUFFIX}")
        for number, shard in enumerate(shards, 1)
    ]


def _digest(shards: Iterable[Shard]) -> str:
    """The same for shards of the same bytes, whatever their names: headers tell the source's fingerprint."""
    running = hashlib.sha256()
    for shard in shards:
        running.update(shard.header)
        running.update(json.dumps([tensor.entry.key for tensor in shard.tensors]).encode())
    return running.hexdigest()[:32]


def named_by(index: bytes) -> frozenset[str]:
    """Names of the files that an index leads to.

    Raises:
        ValueError: it is no index.
    """
    document = json.loads(index)
    places = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(places, dict):
        raise ValueError("an index without a weight_map")
    return frozenset(str(name) for name in places.values())


def _check_names(tensors: Iterable[OutTensor]) -> None:
    seen: dict[str, OutTensor] = {}
    for tensor in tensors:
        other = seen.setdefault(tensor.name, tensor)
        if other is not tensor:
            raise UsageError(
                f"{other.entry.key!r} and {tensor.entry.key!r} would both be called {tensor.name!r}; "
                f"--rename or --exclude one of them"
            )
        if tensor.name == _METADATA or any("\ud800" <= letter <= "\udfff" for letter in tensor.name):
            raise UsageError(f"{tensor.name!r} cannot be a name in a safetensors file; --rename it")


def _shard(name: str, tensors: Iterable[OutTensor], metadata: Mapping[str, str]) -> Shard:
    order = tuple(sorted(tensors, key=lambda tensor: (-ITEMSIZE[tensor.dtype], tensor.name)))
    entries: dict[str, object] = {_METADATA: dict(metadata)}
    end = 0
    for tensor, start in _placed(order, 0):
        end = start + tensor.nbytes
        entries[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.entry.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise UsageError(
            f"the header of {name} would take {len(text)} bytes, more than readers accept "
            f"({HEADER_LIMIT}); lower --max-shard-size"
        )
    header = len(text).to_bytes(8, "little") + text
    return Shard(name, header, order, len(header) + end)


def _placed(order: Iterable[OutTensor], start: int) -> Iterator[tuple[OutTensor, int]]:
    """Tensors with the bytes at which they begin, the first one at ``start``."""
    for tensor in order:
        yield tensor, start
        start += tensor.nbytes
