"""`Record`: the byte range of an object that holds one written item."""

from __future__ import annotations

from dataclasses import dataclass


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
