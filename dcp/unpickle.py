"""The closed-set reader of `.metadata`: a pickle in, inert values out, nothing executed.

`.metadata` is a pickle of about a dozen classes. `load` resolves exactly those names, under today's and
older module paths, to inert stand-ins defined here or in `dcp`; any other name ends the load
with `metadata.unsafe`. The C unpickler does the work, so what it may call is what `find_class` returns:
types whose construction only stores values, sealed (`dcp.sealed`) so that no pickle can change
what a later load sees.

Stand-ins carry the attribute names of their originals (`state_dict_metadata`, `relative_path`, ...);
`dcp.index` turns them into its own types; chunks and byte ranges, of which there are millions, become
`Box` and `Record` at once.
"""

from __future__ import annotations

import gc
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from dcp.boxes import Box, Shape
from dcp.dtypes import ITEMSIZE
from dcp.errors import CkptError, MetadataError
from dcp.record import Record
from dcp.sealed import INTEGERS, Sealed, malformed, seal

_DTYPE_ALIASES = {"half": "float16", "float": "float32", "double": "float64", "long": "int64", "int": "int32"}
_LAYOUTS = frozenset(
    {"strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged", "_mkldnn"}
)


class Token(str):
    """A name that stands for a torch constant: a dtype, a layout, a memory format."""

    __slots__ = ()


@seal
class StandIn(metaclass=Sealed):
    """An instance of one of the known classes, holding whatever state the pickle gave it, unjudged."""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: object) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict | type(None)):
            merged: dict[Any, Any] = {}
            for part in state:
                merged.update(part or {})
            state = merged
        if isinstance(state, dict):
            self.__dict__.update({k: v for k, v in state.items() if type(k) is str})
        else:
            self.__dict__["state"] = state


@seal
class WireMetadata(StandIn):
    """`Metadata`: state_dict_metadata, planner_data, storage_data, storage_meta, version."""


@seal
class WireTensor(StandIn):
    """`TensorStorageMetadata`: properties, size, chunks."""


@seal
class WireBytes(StandIn):
    """`BytesStorageMetadata`, which has no fields."""


@seal
class WireProperties(StandIn):
    """`TensorProperties`: state is the tuple (dtype, layout, requires_grad, memory format, pin_memory)."""


@seal
class WireStorageMeta(StandIn):
    """`StorageMeta`: checkpoint_id, save_id, load_id, modules."""


@seal
class WireInert(StandIn):
    """Something a framework pickles along that this package has no use for."""


@seal
class WireLayout(metaclass=Sealed):
    """`torch.serialization._get_layout`. Callables are sealed classes too: a function has attributes."""

    def __new__(cls, name: object) -> Any:
        return Token(name) if isinstance(name, str) else Token("unknown")


@seal
class WirePath(metaclass=Sealed):
    """The `pathlib` constructors."""

    def __new__(cls, *parts: object) -> Any:
        text = [part for part in parts if isinstance(part, str)]
        return "/".join([*(part.rstrip("/") for part in text[:-1]), *text[-1:]]) or "."


@seal
class WireEnum(metaclass=Sealed):
    """An enum class called with a value."""

    def __new__(cls, value: object) -> Any:
        if not isinstance(value, int | str):
            raise pickle.UnpicklingError(f"enum of {type(value).__name__}")
        return Token(str(value))


@seal
class WireIndex(metaclass=Sealed):
    """`MetadataIndex`: fqn, offset. Identity-hashed, so that doubled keys stay visible to the reader."""

    __slots__ = ("fqn", "offset")

    def __setstate__(self, state: dict[str, Any]) -> None:
        fqn, offset = state["fqn"], state.get("offset")
        if type(fqn) is not str:
            malformed("a storage entry has no key")
        if offset is not None and not (type(offset) is tuple and INTEGERS.issuperset(map(type, offset))):
            malformed("the offset of a storage entry is not a tuple of integers")
        self.fqn: str = fqn
        self.offset: Shape | None = offset
        state.clear()


_CHECKPOINT = ("torch.distributed.checkpoint.metadata", "torch.distributed._shard.checkpoint.metadata")
_FILESYSTEM = ("torch.distributed.checkpoint.filesystem", "torch.distributed._shard.checkpoint.filesystem")
_PLANNER = ("torch.distributed.checkpoint.planner", "torch.distributed._shard.checkpoint.planner")
_PROPERTIES = (*_CHECKPOINT, "torch.distributed._shard.sharded_tensor.metadata")
_PATHS = ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")


def _table() -> dict[tuple[str, str], object]:
    """What each known (module, name) resolves to."""

    table: dict[tuple[str, str], object] = {
        ("torch", "Size"): tuple,
        ("torch.serialization", "_get_layout"): WireLayout,
        ("collections", "OrderedDict"): dict,
    }
    for name in ITEMSIZE:
        table["torch", name] = Token(name)
    for alias, name in _DTYPE_ALIASES.items():
        table["torch", alias] = Token(name)
    for name in _LAYOUTS:
        table["torch", name] = Token("torch." + name)
    known: list[tuple[tuple[str, ...], tuple[str, ...], type]] = [
        (_CHECKPOINT, ("Metadata",), WireMetadata),
        (_CHECKPOINT, ("TensorStorageMetadata",), WireTensor),
        (_CHECKPOINT, ("BytesStorageMetadata",), WireBytes),
        (_CHECKPOINT, ("ChunkStorageMetadata",), Box),
        (_CHECKPOINT, ("MetadataIndex",), WireIndex),
        (_CHECKPOINT, ("StorageMeta",), WireStorageMeta),
        (_PROPERTIES, ("TensorProperties",), WireProperties),
        (_PROPERTIES, ("MEM_FORMAT_ENCODING", "_MEM_FORMAT_ENCODING"), WireEnum),
        (_FILESYSTEM, ("_StorageInfo",), Record),
        (_FILESYSTEM, ("_StoragePrefix",), WireInert),
        (_PLANNER, ("SavePlan", "WriteItem", "TensorWriteData"), WireInert),
        (_PLANNER, ("WriteItemType",), WireEnum),
        (("pathlib", "pathlib._local"), _PATHS, WirePath),
    ]
    for modules, names, base in known:
        for module in modules:
            for name in names:
                table[module, name] = base
    return table


_TABLE = _table()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _TABLE[module, name]
        except KeyError:
            raise MetadataError(
                f".metadata asks for {module}.{name}, which is not part of the checkpoint format; "
                "nothing was executed. Do not load this checkpoint with torch until its origin is clear",
                code="metadata.unsafe",
                file=".metadata",
                **{"global": f"{module}.{name}"},
            ) from None

    def persistent_load(self, pid: object) -> NoReturn:
        raise MetadataError(
            ".metadata holds a persistent id, which is not part of the checkpoint format",
            code="metadata.unsafe",
            file=".metadata",
        )


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the cyclic collector: millions of small live objects make it take most of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def load(source: io.BufferedReader[Any], file: str = ".metadata") -> WireMetadata:
    """Unpickle a `.metadata` object into stand-ins.

    Args:
        source: a buffered stream of its content.
        file: its name, for messages.

    Raises:
        MetadataError: ``metadata.empty``, ``metadata.unreadable`` or ``metadata.unsafe``.
        StorageError, CheckpointError: from reading ``source``.
    """
    if not source.peek(1):
        raise MetadataError(f"{file} is empty", code="metadata.empty", file=file)
    try:
        with gc_paused():
            loaded = _Unpickler(source).load()
    except MetadataError as error:
        error.file = file
        raise
    except CkptError:
        raise
    except RecursionError:
        raise MetadataError(f"{file} is nested too deeply", code="metadata.unreadable", file=file) from None
    # The C unpickler lets malformed input surface as almost any exception type.
    except Exception as error:
        raise MetadataError(
            f"{file} is not a readable pickle ({type(error).__name__}: {error})",
            code="metadata.unreadable",
            file=file,
        ) from None
    if not isinstance(loaded, WireMetadata):
        raise MetadataError(
            f"{file} holds {type(loaded).__name__}, not checkpoint metadata",
            code="metadata.unreadable",
            file=file,
        )
    return loaded
