"""What `.metadata` says, in light frozen types, read without torch.

`CheckpointIndex` maps each flattened state-dict key to a `TensorEntry` (shape, dtype, and chunks with
the record each stands in) or an `ObjectEntry` (one pickled value). A `Record` is a byte range of one
object. `parse` builds the index from `.metadata` bytes; nothing is checked here beyond what makes the
types true: tiling, files and records are judged in `dcp.checks`.

Rank-local saves have no `.metadata` but one `__R.metadata` a rank; `merge` joins them into one index.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from dcp.boxes import Box, Shape
from dcp.dtypes import ITEMSIZE
from dcp.errors import MetadataError
from dcp.unpickle import (
    Token,
    WireBox,
    WireBytes,
    WireIndex,
    WireMetadata,
    WireProperties,
    WireStorageInfo,
    WireStorageMeta,
    WireTensor,
    gc_paused,
    load,
)

METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class Record:
    """One written item: bytes ``offset <= i < offset + length`` of an object."""

    path: str
    """Object name relative to the checkpoint's prefix, as written; not yet known to be safe."""
    offset: int
    """First byte within the object."""
    length: int
    """Length in bytes."""
    transforms: tuple[str, ...] = ()
    """Stream transforms to undo, outermost first, e.g. ``("stream.zstd/1",)``."""

    @property
    def end(self) -> int:
        """Exclusive end within the object, in bytes."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Chunk:
    """A saved region of a tensor and the record that holds it; ``record`` is None if the index has none."""

    box: Box
    record: Record | None


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of the checkpoint. ``shape`` counts elements; ``chunks`` are in the index's order."""

    key: str
    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]

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
                for chunk in entry.chunks:
                    if chunk.record is not None:
                        yield entry.key, chunk.record

    def path_of(self, key: str) -> tuple[PathPart, ...]:
        """Path of ``key`` in the nested state dict; the key itself where none was recorded."""
        return self.paths[key] if self.paths is not None and key in self.paths else (key,)


def parse(data: bytes, file: str = METADATA) -> CheckpointIndex:
    """Build the index from the bytes of a `.metadata` object.

    Raises:
        MetadataError: ``metadata.empty``, ``metadata.unreadable``, ``metadata.unsafe``, or
            ``metadata.unsupported`` for a well-formed index of an unknown kind.
    """
    wire = load(data, file)
    with gc_paused():
        return _Parser(wire, file).index()


class _Parser:
    """Turns stand-ins, whose fields may hold anything, into typed values or a MetadataError."""

    def __init__(self, wire: WireMetadata, file: str) -> None:
        self.wire = wire
        self.file = file
        self.records: dict[tuple[str, Shape | None], Record] = {}

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
        known: set[tuple[str, Shape | None]] = set()
        for entry in entries.values():
            if isinstance(entry, ObjectEntry):
                known.add((entry.key, None))
            else:
                known.update((entry.key, chunk.box.offsets) for chunk in entry.chunks)
        meta = fields.get("storage_meta")
        meta_fields = vars(meta) if isinstance(meta, WireStorageMeta) else {}
        return CheckpointIndex(
            entries=entries,
            paths=self._paths(fields.get("planner_data")),
            version=_text(fields.get("version")),
            framework_plans="all_local_plans" in fields,
            unreferenced=tuple(
                dict.fromkeys(key for key, offset in self.records if (key, offset) not in known)
            ),
            checkpoint_id=_text(meta_fields.get("checkpoint_id")),
            save_id=_text(meta_fields.get("save_id")),
        )

    def _read_storage(self, storage: object) -> None:
        if type(storage) is not dict:
            raise self.fail("storage_data is not a dict of byte ranges")
        for place, info in storage.items():
            if not isinstance(place, WireIndex) or not isinstance(info, WireStorageInfo):
                raise MetadataError(
                    f"{self.file} was written by a storage plugin this reader does not know "
                    f"({type(place).__name__} -> {type(info).__name__})",
                    code="metadata.unsupported",
                    file=self.file,
                )
            index = vars(place)
            key, offset = index.get("fqn"), index.get("offset")
            if type(key) is not str:
                raise self.fail("a storage entry has no key")
            if offset is not None:
                offset = self._shape(offset, key, "offset of a storage entry")
            if (key, offset) in self.records:
                raise self.fail(f"two storage entries for the chunk at {offset}", key)
            self.records[key, offset] = self._record(info, key)

    def _record(self, info: WireStorageInfo, key: str) -> Record:
        fields = vars(info)
        path, offset, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
        if type(path) is not str:
            raise self.fail("a storage entry names no file", key)
        if type(offset) is not int or type(length) is not int:
            raise self.fail(f"a storage entry in {path!r} has no byte range", key)
        transforms = fields.get("transform_descriptors") or ()
        if not isinstance(transforms, list | tuple) or not all(type(t) is str for t in transforms):
            raise self.fail("transform descriptors are not names", key)
        return Record(path, offset, length, tuple(transforms))

    def _shape(self, value: object, key: str, what: str) -> Shape:
        if type(value) is list:
            value = tuple(value)
        if type(value) is not tuple or not all(type(n) is int for n in value):
            raise self.fail(f"{what} is not a tuple of integers", key)
        return value

    def _entry(self, key: str, value: object) -> Entry:
        if isinstance(value, WireBytes):
            return ObjectEntry(key, self.records.get((key, None)))
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
            key, self._dtype(fields.get("properties"), key), shape, tuple(self._chunk(key, c) for c in chunks)
        )

    def _chunk(self, key: str, wire: object) -> Chunk:
        if not isinstance(wire, WireBox):
            raise self.fail(f"a chunk is {type(wire).__name__}", key)
        try:
            offsets = self._shape(wire.offsets, key, "chunk offsets")
            sizes = self._shape(wire.sizes, key, "chunk sizes")
        except AttributeError:
            raise self.fail("a chunk without offsets or sizes", key) from None
        return Chunk(Box(offsets, sizes), self.records.get((key, offsets)))

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
            held = {chunk.box for chunk in known.chunks}
            added = tuple(chunk for chunk in entry.chunks if chunk.box not in held)
            return TensorEntry(known.key, known.dtype, known.shape, known.chunks + added)
    elif isinstance(known, ObjectEntry) and isinstance(entry, ObjectEntry):
        return known
    raise MetadataError(
        f"rank {rank} describes {entry.key!r} differently from lower ranks",
        code="metadata.unreadable",
        key=entry.key,
        file=f"__{rank}{METADATA}",
    )
