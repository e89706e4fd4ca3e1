"""Inert values that the classes named in `.metadata` become, and `TABLE`, the closed set of those names.

A name of the table stands on the machine's stack as a `Token` (a torch constant) or a `Known` (a class or
function, with what calling it gives). Instances are `WireChunk`, `WireRecord` and `WireIndex`, of which
there are millions, and `Instance` for all else, which keeps whatever state it was given, unjudged.
Attribute names are torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dcp.boxes import Shape
from dcp.dtypes import ITEMSIZE

_DTYPE_ALIASES = {"half": "float16", "float": "float32", "double": "float64", "long": "int64", "int": "int32"}
_LAYOUTS = frozenset(
    {"strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged", "_mkldnn"}
)
_LAYOUT_NAMES = frozenset(f"torch.{name}" for name in _LAYOUTS)
MEMORY_FORMATS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
"""Members of torch's enum, each in the place that its value says."""


class UnsafeCallError(ValueError):
    """A call that no checkpoint needs, and that would reach for code if it were made."""


class Token(str):
    """A name that stands for a torch constant: a dtype, a layout, a memory format."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A callable of the closed set.

    Attributes:
        make: what a call with these arguments gives; raises `ValueError` if it cannot be called so.
    """

    name: str
    make: Callable[[tuple[Any, ...]], object]


@dataclass(slots=True, eq=False)
class Instance:
    """An instance of a known class with whatever state the pickle gave it, by attribute name.

    A state that is no dict stands under ``state``.
    """

    known: Known
    fields: dict[str, Any] = field(default_factory=dict)


class WireChunk:
    """`ChunkStorageMetadata`; without state yet, ``offsets`` is None."""

    __slots__ = ("offsets", "sizes")

    def __init__(self) -> None:
        self.offsets: Shape | None = None
        self.sizes: Shape = ()


class WireRecord:
    """`_StorageInfo`; without state yet, ``path`` is None."""

    __slots__ = ("length", "offset", "path", "transforms")

    def __init__(self) -> None:
        self.path: str | None = None
        self.offset = 0
        self.length = 0
        self.transforms: tuple[str, ...] = ()


class WireIndex:
    """`MetadataIndex`; without state yet, ``fqn`` is None.

    Hashed by identity, so that doubled keys stay visible to the reader.
    """

    __slots__ = ("fqn", "offset")

    def __init__(self) -> None:
        self.fqn: str | None = None
        self.offset: Shape | None = None


def _instances(name: str) -> Known:
    known = Known(name, lambda _: Instance(known))
    return known


def _size(args: tuple[Any, ...]) -> Shape:
    if not args:
        return ()
    (items,) = args
    if type(items) is list:
        return tuple(items)
    if type(items) is not tuple:
        raise ValueError("torch.Size is called without a tuple")
    return items


def _ordered(args: tuple[Any, ...]) -> dict[Any, Any]:
    if args:
        raise ValueError("OrderedDict is called with content")
    return {}


def _layout(args: tuple[Any, ...]) -> Token:
    (name,) = args
    if not isinstance(name, str) or name not in _LAYOUT_NAMES:
        raise ValueError("a layout has a name that torch does not know")
    return Token(name)


def _path(args: tuple[Any, ...]) -> str:
    text = [part for part in args if isinstance(part, str)]
    return "/".join([*(part.rstrip("/") for part in text[:-1]), *text[-1:]]) or "."


def _enum(args: tuple[Any, ...]) -> Token:
    (value,) = args
    if not isinstance(value, int | str):
        raise ValueError(f"enum of {type(value).__name__}")
    return Token(str(value))


def _memory_format(args: tuple[Any, ...]) -> Token:
    (value,) = args
    if type(value) is not int or not 0 <= value < len(MEMORY_FORMATS):
        raise ValueError("a memory format that torch does not know")
    return Token(MEMORY_FORMATS[value])


def _member(args: tuple[Any, ...]) -> Token:
    """A member of an enum by its name, as Python 3.11.0 to 3.11.3 write it: ``getattr(enum, name)``."""
    whose, name = args if len(args) == 2 else (None, None)
    if (whose is not ENUM and whose is not MEMORY_FORMAT) or not isinstance(name, str):
        raise UnsafeCallError("builtins.getattr of something other than an enum")
    return Token(name)


METADATA = _instances("Metadata")
TENSOR = _instances("TensorStorageMetadata")
BYTES = _instances("BytesStorageMetadata")
PROPERTIES = _instances("TensorProperties")
STORAGE_META = _instances("StorageMeta")
INERT = _instances("an object of a framework")
ENUM = Known("an enum", _enum)
MEMORY_FORMAT = Known("a memory format", _memory_format)
SIZE = Known("torch.Size", _size)
CHUNK = Known("ChunkStorageMetadata", lambda _: WireChunk())
RECORD = Known("_StorageInfo", lambda _: WireRecord())
INDEX = Known("MetadataIndex", lambda _: WireIndex())

_CHECKPOINT = ("torch.distributed.checkpoint.metadata", "torch.distributed._shard.checkpoint.metadata")
_FILESYSTEM = ("torch.distributed.checkpoint.filesystem", "torch.distributed._shard.checkpoint.filesystem")
_PLANNER = ("torch.distributed.checkpoint.planner", "torch.distributed._shard.checkpoint.planner")
_PROPERTIES = (*_CHECKPOINT, "torch.distributed._shard.sharded_tensor.metadata")
_PATHS = ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")


def _table() -> dict[tuple[str, str], Token | Known]:
    table: dict[tuple[str, str], Token | Known] = {
        ("torch", "Size"): SIZE,
        ("torch.serialization", "_get_layout"): Known("_get_layout", _layout),
        ("collections", "OrderedDict"): Known("OrderedDict", _ordered),
    }
    for name in ITEMSIZE:
        table["torch", name] = Token(name)
    for alias, name in _DTYPE_ALIASES.items():
        table["torch", alias] = Token(name)
    for name in _LAYOUTS:
        table["torch", name] = Token("torch." + name)
    known: list[tuple[tuple[str, ...], tuple[str, ...], Known]] = [
        (_CHECKPOINT, ("Metadata",), METADATA),
        (_CHECKPOINT, ("TensorStorageMetadata",), TENSOR),
        (_CHECKPOINT, ("BytesStorageMetadata",), BYTES),
        (_CHECKPOINT, ("ChunkStorageMetadata",), CHUNK),
        (_CHECKPOINT, ("MetadataIndex",), INDEX),
        (_CHECKPOINT, ("StorageMeta",), STORAGE_META),
        (_PROPERTIES, ("TensorProperties",), PROPERTIES),
        (_PROPERTIES, ("MEM_FORMAT_ENCODING", "_MEM_FORMAT_ENCODING"), MEMORY_FORMAT),
        (_FILESYSTEM, ("_StorageInfo",), RECORD),
        (_FILESYSTEM, ("_StoragePrefix",), INERT),
        (_PLANNER, ("SavePlan", "WriteItem", "TensorWriteData"), INERT),
        (_PLANNER, ("WriteItemType",), ENUM),
        (("builtins", "__builtin__"), ("getattr",), Known("builtins.getattr", _member)),
        (("pathlib", "pathlib._local"), _PATHS, Known("a path", _path)),
    ]
    for modules, names, what in known:
        for module in modules:
            for name in names:
                table[module, name] = what
    return table


TABLE = _table()
"""What each permitted (module, name) resolves to."""
