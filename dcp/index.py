"""What `.metadata` says, in light frozen types, read without torch.

`CheckpointIndex` maps each flattened state-dict key to a `TensorEntry` (shape, dtype, and chunks with
the record each stands in) or an `ObjectEntry` (one pickled value). A `Record` is a byte range of one
object. `parse` builds the index from `.metadata` bytes; nothing is checked here beyond what makes the
types true: tiling, files and records are judged in `dcp.checks`.

Rank-local saves have no `.metadata` but one `__R.metadata` a rank; `merge` joins them into one index.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, overload

from dcp.boxes import Box, Shape
from dcp.dtypes import ITEMSIZE
from dcp.errors import MetadataError
from dcp.record import Record
from dcp.sealed import INTEGERS
from dcp.unpickle import (
    Token,
    WireBytes,
    WireIndex,
    WireMetadata,
    WireProperties,
    WireStorageMeta,
    WireTensor,
    gc_paused,
    load,
)

METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A saved region of a tensor and the record that holds it; ``record`` is None if the index has none."""

    box: Box
    record: Record | None


@dataclass(frozen=True, slots=True)
class Chunks(Sequence[Chunk]):
    """The chunks of a tensor as two columns, since millions of pairs would double the index's size."""

    boxes: tuple[Box, ...]
    records: tuple[Record | None, ...]

    def __len__(self) -> int:
        return len(self.boxes)

    @overload
    def __getitem__(self, i: int) -> Chunk: ...
    @overload
    def __getitem__(self, i: slice) -> Chunks: ...
    def __getitem__(self, i: int | slice) -> Chunk | Chunks:
        if isinstance(i, slice):
            return Chunks(self.boxes[i], self.records[i])
        return Chunk(self.boxes[i], self.records[i])

    def __iter__(self) -> Iterator[Chunk]:
        return map(Chunk, self.boxes, self.records)

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> Chunks:
        """The columns of some chunks."""
        pairs = tuple(chunks)
        return cls(tuple(c.box for c in pairs), tuple(c.record for c in pairs))


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of the checkpoint. ``shape`` counts elements; ``chunks`` are in the index's order."""

    key: str
    dtype: str
    shape: Shape
    chunks: Chunks

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor in memory."""
        return prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """A value saved as a pickled object; ``record`` is None if the index has none."""

    key: str
    record: Record | None


Entry = TensorEntry | ObjectEntry
PathPart = str | int


@dataclass(frozen=True)
class CheckpointIndex:
    """The whole index. Iteration and order follow the index file."""

    entries: Mapping[str, Entry]
    paths: Mapping[str, tuple[PathPart, ...]] | None
    """Where each flattened key stood in the nested state dict (`planner_data`); None if not recorded."""
    version: str | None = None
    """DCP format version as recorded, e.g. ``"1.0.0"``."""
    checkpoint_id: str | None = None
    """Where the writer said it saved to."""
    save_id: str | None = None
    framework_plans: bool = False
    """Whether a framework pickled its own save plans along (Megatron does)."""
    ranks: tuple[int, ...] | None = None
    """For a rank-local save, the ranks whose `__R.metadata` were merged; None for a collective save."""
    unreferenced: tuple[str, ...] = field(default=(), repr=False)
    """Keys that have storage but no description."""

    @cached_property
    def tensors(self) -> tuple[TensorEntry, ...]:
        return tuple(e for e in self.entries.values() if isinstance(e, TensorEntry))

    @cached_property
    def objects(self) -> tuple[ObjectEntry, ...]:
        return tuple(e for e in self.entries.values() if isinstance(e, ObjectEntry))

    def records(self) -> Iterator[tuple[str, Record]]:
        """Every (key, record), in index order."""
        for entry in self.entries.values():
            if isinstance(entry, ObjectEntry):
                if entry.record is not None:
                    yield entry.key, entry.record
            else:
                for record in entry.chunks.records:
                    if record is not None:
                        yield entry.key, record

    def path_of(self, key: str) -> tuple[PathPart, ...]:
        """Path of ``key`` in the nested state dict; the key itself where none was recorded."""
        return self.paths[key] if self.paths is not None and key in self.paths else (key,)


def parse(data: bytes | io.BufferedReader[Any], file: str = METADATA) -> CheckpointIndex:
    """Build the index from a `.metadata` object, given whole or as a stream.

    Raises:
        MetadataError: ``metadata.empty``, ``metadata.unreadable``, ``metadata.unsafe``, or
            ``metadata.unsupported`` for a well-formed index of an unknown kind.
    """
    stream: io.BufferedReader[Any] = io.BufferedReader(io.BytesIO(data)) if isinstance(data, bytes) else data
    wire = load(stream, file)
    with gc_paused():
        return _Parser(wire, file).index()


class _Parser:
    """Turns stand-ins, whose fields may hold anything, into typed values or a MetadataError."""

    def __init__(self, wire: WireMetadata, file: str) -> None:
        self.wire = wire
        self.file = file
        self.records: dict[str, dict[Shape | None, Record]] = {}

    def fail(self, what: str, key: str | None = None) -> MetadataError:
        where = f" (key {key!r})" if key is not None else ""
        return MetadataError(
            f"{self.file} is malformed: {what}{where}", code="metadata.unreadable", key=key, file=self.file
        )

    def index(self) -> CheckpointIndex:
        fields = vars(self.wire)
        described = fields.get("state_dict_metadata")
        if type(described) is not dict:
            raise self.fail("state_dict_metadata is not a dict")
        self._read_storage(fields.get("storage_data"))
        entries: dict[str, Entry] = {}
        for key, value in described.items():
            if type(key) is not str:
                raise self.fail(f"a key is {type(key).__name__}, not str")
            entries[key] = self._entry(key, value)
        meta = fields.get("storage_meta")
        meta_fields = vars(meta) if isinstance(meta, WireStorageMeta) else {}
        return CheckpointIndex(
            entries=entries,
            paths=self._paths(fields.get("planner_data")),
            version=_text(fields.get("version")),
            framework_plans="all_local_plans" in fields,
            unreferenced=tuple(
                key for key, of_key in self.records.items() if _left_over(of_key, entries.get(key))
            ),
            checkpoint_id=_text(meta_fields.get("checkpoint_id")),
            save_id=_text(meta_fields.get("save_id")),
        )

    def _read_storage(self, storage: object) -> None:
        if type(storage) is not dict:
            raise self.fail("storage_data is not a dict of byte ranges")
        records = self.records
        try:
            for place, record in storage.items():
                if type(place) is not WireIndex or type(record) is not Record:
                    raise self._unknown_plugin(place, record)
                of_key = records.get(place.fqn)
                if of_key is None:
                    of_key = records[place.fqn] = {}
                if place.offset in of_key:
                    raise self.fail(f"two storage entries for the chunk at {place.offset}", place.fqn)
                of_key[place.offset] = record
        except AttributeError:
            raise self.fail("a storage entry without fields") from None

    def _unknown_plugin(self, place: object, record: object) -> MetadataError:
        return MetadataError(
            f"{self.file} was written by a storage plugin this reader does not know "
            f"({type(place).__name__} -> {type(record).__name__})",
            code="metadata.unsupported",
            file=self.file,
        )

    def _shape(self, value: object, key: str, what: str) -> Shape:
        if type(value) is list:
            value = tuple(value)
        if type(value) is not tuple or not INTEGERS.issuperset(map(type, value)):
            raise self.fail(f"{what} is not a tuple of integers", key)
        return value

    def _entry(self, key: str, value: object) -> Entry:
        if isinstance(value, WireBytes):
            return ObjectEntry(key, self.records.get(key, {}).get(None))
        if not isinstance(value, WireTensor):
            raise self.fail(f"an entry is {type(value).__name__}", key)
        fields = vars(value)
        shape = self._shape(fields.get("size"), key, "the size")
        if any(n < 0 for n in shape):
            raise self.fail(f"negative size {shape}", key)
        chunks = fields.get("chunks")
        if not isinstance(chunks, list | tuple):
            raise self.fail("chunks are not a list", key)
        return TensorEntry(
            key, self._dtype(fields.get("properties"), key), shape, self._chunks(key, tuple(chunks))
        )

    def _chunks(self, key: str, boxes: tuple[Any, ...]) -> Chunks:
        if not {Box}.issuperset(map(type, boxes)):
            raise self.fail("something in the list of chunks is none", key)
        record_at = self.records.get(key, {}).get
        try:
            return Chunks(boxes, tuple([record_at(box.offsets) for box in boxes]))
        except AttributeError:
            raise self.fail("a chunk without offsets or sizes", key) from None

    def _dtype(self, properties: object, key: str) -> str:
        if isinstance(properties, WireProperties):
            state: Any = vars(properties).get("state")
            dtype = state[0] if type(state) is tuple and state else vars(properties).get("dtype")
            if isinstance(dtype, Token) and dtype in ITEMSIZE:
                return str(dtype)
        raise self.fail("no dtype", key)

    def _paths(self, planner_data: object) -> dict[str, tuple[PathPart, ...]] | None:
        if type(planner_data) is not dict or not planner_data:
            return None
        paths: dict[str, tuple[PathPart, ...]] = {}
        for key, path in planner_data.items():
            if type(key) is not str or type(path) is not tuple or not path:
                raise self.fail("planner_data is not a map from keys to paths")
            if not all(type(part) in (str, int) for part in path):
                raise self.fail("a path holds something other than str and int", key)
            paths[key] = path
        return paths


def _left_over(records: Mapping[Shape | None, Record], entry: Entry | None) -> bool:
    """Whether records of a key belong to none of its chunks."""
    if entry is None:
        return True
    if isinstance(entry, ObjectEntry):
        return records.keys() != {None}
    return not records.keys() <= {box.offsets for box in entry.chunks.boxes}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def merge(parts: Sequence[tuple[int, CheckpointIndex]]) -> CheckpointIndex:
    """Join the indices of a rank-local save into one, lowest rank first.

    A chunk or object that several ranks hold is taken from the lowest one, as a collective save would.

    Args:
        parts: (rank, index) of every `__R.metadata` found; not empty.

    Raises:
        MetadataError: ``metadata.unreadable`` where ranks disagree on a tensor's shape, dtype or kind.
    """
    parts = sorted(parts, key=lambda part: part[0])
    entries: dict[str, Entry] = {}
    paths: dict[str, tuple[PathPart, ...]] = {}
    for rank, part in parts:
        paths.update({k: v for k, v in (part.paths or {}).items() if k not in paths})
        for key, entry in part.entries.items():
            known = entries.get(key)
            entries[key] = entry if known is None else _join(known, entry, rank)
    first = parts[0][1]
    return CheckpointIndex(
        entries=entries,
        paths=paths or None,
        version=first.version,
        checkpoint_id=first.checkpoint_id,
        save_id=first.save_id,
        framework_plans=first.framework_plans,
        ranks=tuple(rank for rank, _ in parts),
        unreferenced=tuple(dict.fromkeys(key for _, part in parts for key in part.unreferenced)),
    )


def _join(known: Entry, entry: Entry, rank: int) -> Entry:
    if isinstance(known, TensorEntry) and isinstance(entry, TensorEntry):
        if (known.shape, known.dtype) == (entry.shape, entry.dtype):
            held = set(known.chunks.boxes)
            added = tuple(chunk for chunk in entry.chunks if chunk.box not in held)
            return TensorEntry(known.key, known.dtype, known.shape, Chunks.of([*known.chunks, *added]))
    elif isinstance(known, ObjectEntry) and isinstance(entry, ObjectEntry):
        return known
    raise MetadataError(
        f"rank {rank} describes {entry.key!r} differently from lower ranks",
        code="metadata.unreadable",
        key=entry.key,
        file=f"__{rank}{METADATA}",
    )
