"""What a load needs from storage: one piece of a chunk, or one object. Pure values."""

from __future__ import annotations

from dataclasses import dataclass

from dcp.index import Chunk, ObjectEntry, TensorEntry
from dcp.load.regions import Span
from dcp.record import Record


@dataclass(frozen=True, slots=True)
class ChunkNeed:
    """A piece of a chunk."""

    entry: TensorEntry
    chunk: Chunk
    span: Span

    @property
    def record(self) -> Record | None:
        return self.chunk.record

    @property
    def cost(self) -> int:
        """Bytes to be read for it, heads left out."""
        return self.span.end - self.span.start

    @property
    def place(self) -> tuple[str, Chunk]:
        """What tells the chunk from all others."""
        return self.entry.key, self.chunk


@dataclass(frozen=True, slots=True)
class ObjectNeed:
    """A whole object."""

    entry: ObjectEntry

    @property
    def record(self) -> Record | None:
        return self.entry.record

    @property
    def cost(self) -> int:
        """Bytes to be read for it."""
        return 0 if self.record is None else self.record.length


Need = ChunkNeed | ObjectNeed
