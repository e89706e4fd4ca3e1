"""`Record`: the byte range of an object that holds one written item."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dcp.sealed import Sealed, malformed, seal


@seal
@dataclass(frozen=True, slots=True)
class Record(metaclass=Sealed):
    """One written item: bytes ``offset <= i < offset + length`` of an object.

    Also what `dcp.unpickle` makes of torch's `_StorageInfo`, of which there are millions.
    """

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

    def __reduce__(self) -> tuple[type[Record], tuple[str, int, int, tuple[str, ...]]]:
        return Record, (self.path, self.offset, self.length, self.transforms)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what torch pickled. Raises `pickle.UnpicklingError` for fields of the wrong kind."""
        path, offset, length = state["relative_path"], state["offset"], state["length"]
        transforms = state.get("transform_descriptors") or ()
        if type(path) is not str or type(offset) is not int or type(length) is not int:
            malformed("a storage entry has no file or no byte range")
        if transforms and not (
            isinstance(transforms, list | tuple) and {str}.issuperset(map(type, transforms))
        ):
            malformed("transform descriptors are not names")
        _set_path(self, path)
        _set_offset(self, offset)
        _set_length(self, length)
        _set_transforms(self, tuple(transforms))
        # The unpickler's memo keeps every state alive to the end of the load.
        state.clear()


# The class is frozen; its slots are set through their descriptors.
_set_path, _set_offset, _set_length, _set_transforms = (
    vars(Record)[name].__set__ for name in ("path", "offset", "length", "transforms")
)
