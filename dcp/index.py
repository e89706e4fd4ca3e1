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
from dcp.collector import gc_paused
from dcp.columns import RecordColumns
from dcp.dtypes import ITEMSIZE
from dcp.errors import MetadataError
from dcp.record import Record

METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A saved region of a tensor and the record that holds it; ``record`` is None if the index has none."""

    box: Box
    record: Record | None


@dataclass(frozen=True, slots=True)
class Chunks(Sequence[Chunk]):
    """The chunks of a tensor as two columns, since millions of pairs would double the index's size."""

    boxes: Sequence[Box]
    """A tuple, or `dcp.columns.BoxColumns` where there are many."""
    records: Sequence[Record | None]
    """A tuple, or `dcp.columns.RecordColumns` where there are many."""

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

    def stored(self) -> tuple[set[str], int, int]:
        """Objects that the records stand in, how many records there are, and the bytes of all of them."""
        if isinstance(self.records, RecordColumns):
            return self.records.stored()
        present = [record for record in self.records if record is not None]
        return {record.path for record in present}, len(present), sum(record.length for record in present)


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
    unknown_fields: tuple[str, ...] = ()
    """Fields of `Metadata` that no version known here has; what they hold was not looked at."""
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

    def files(self) -> dict[str, int]:
        """How many records stand in each object, by its name."""
        counts: dict[str, int] = {}
        columns: list[RecordColumns] = []
        for entry in self.entries.values():
            records = (entry.record,) if isinstance(entry, ObjectEntry) else entry.chunks.records
            if isinstance(records, RecordColumns):
                columns.append(records)
                continue
            for record in records:
                if record is not None:
                    counts[record.path] = counts.get(record.path, 0) + 1
        for path, count in RecordColumns.tally(columns):
            counts[path] = counts.get(path, 0) + count
        return counts

    def path_of(self, key: str) -> tuple[PathPart, ...]:
        """Path of ``key`` in the nested state dict; the key itself where none was recorded."""
        return self.paths[key] if self.paths is not None and key in self.paths else (key,)


def parse(data: bytes | io.BufferedReader[Any], file: str = METADATA) -> CheckpointIndex:
    """Build the index from a `.metadata` object, given whole or as a stream.

    Raises:
        MetadataError: ``metadata.empty``, ``metadata.unreadable``, ``metadata.unsafe``, or
            ``metadata.unsupported`` for a well-formed index of an unknown kind.
    """
    from dcp.wire.parser import Parser
    from dcp.wire.reader import load

    content = data if isinstance(data, bytes) else data.read()
    with gc_paused():
        return Parser(load(content, file), file).index()


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
        unknown_fields=first.unknown_fields,
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
