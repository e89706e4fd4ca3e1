"""The closed-set reader of `.metadata`: a pickle in, inert values out, nothing executed.

`.metadata` is a pickle of about a dozen classes. `load` resolves exactly those names, under today's and
older module paths, to inert stand-ins defined here or in `dcp.boxes`; any other name ends the load
with `metadata.unsafe`. The C unpickler does the work, so what it may call is what `find_class` returns:
types whose construction only stores values. The stand-in classes are made
anew for each load and sealed against attribute writes, so that a pickle cannot change what a later
load sees.

Stand-ins carry the attribute names of their originals (`state_dict_metadata`, `relative_path`, ...);
`dcp.index` turns them into its own types.
"""

from __future__ import annotations

import gc
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from dcp.dtypes import ITEMSIZE
from dcp.errors import MetadataError

_DTYPE_ALIASES = {"half": "float16", "float": "float32", "double": "float64", "long": "int64", "int": "int32"}
_LAYOUTS = frozenset(
    {"strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged", "_mkldnn"}
)


class Token(str):
    """A name that stands for a torch constant: a dtype, a layout, a memory format."""

    __slots__ = ()


class _Sealed(type):
    """Metaclass of stand-ins: BUILD on the class itself must not leave a trace."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise pickle.UnpicklingError(f"attribute {name!r} set on a class")


class StandIn(metaclass=_Sealed):
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


class WireMetadata(StandIn):
    """`Metadata`: state_dict_metadata, planner_data, storage_data, storage_meta, version."""


class WireTensor(StandIn):
    """`TensorStorageMetadata`: properties, size, chunks."""


class WireBytes(StandIn):
    """`BytesStorageMetadata`, which has no fields."""


class WireProperties(StandIn):
    """`TensorProperties`: state is the tuple (dtype, layout, requires_grad, memory format, pin_memory)."""


class WireIndex(StandIn):
    """`MetadataIndex`: fqn, offset, index. Identity-hashed: doubled keys stay visible to the reader."""


class WireStorageInfo(StandIn):
    """`_StorageInfo`: relative_path, offset, length, transform_descriptors."""


class WireStorageMeta(StandIn):
    """`StorageMeta`: checkpoint_id, save_id, load_id, modules."""


class WireInert(StandIn):
    """Something a framework pickles along that this package has no use for."""


class WireLayout(metaclass=_Sealed):
    """`torch.serialization._get_layout`. Callables are sealed classes too: a function has attributes."""

    def __new__(cls, name: object) -> Any:
        return Token(name) if isinstance(name, str) else Token("unknown")


class WirePath(metaclass=_Sealed):
    """The `pathlib` constructors."""

    def __new__(cls, *parts: object) -> Any:
        text = [part for part in parts if isinstance(part, str)]
        return "/".join([*(part.rstrip("/") for part in text[:-1]), *text[-1:]]) or "."


class WireEnum(metaclass=_Sealed):
    """An enum class called with a value."""

    def __new__(cls, value: object) -> Any:
        if not isinstance(value, int | str):
            raise pickle.UnpicklingError(f"enum of {type(value).__name__}")
        return Token(str(value))


class WireBox(metaclass=_Sealed):
    """`ChunkStorageMetadata`: offsets, sizes. There are millions of it."""

    __slots__ = ("offsets", "sizes")

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.offsets = state["offsets"]
        self.sizes = state["sizes"]


_CHECKPOINT = ("torch.distributed.checkpoint.metadata", "torch.distributed._shard.checkpoint.metadata")
_FILESYSTEM = ("torch.distributed.checkpoint.filesystem", "torch.distributed._shard.checkpoint.filesystem")
_PLANNER = ("torch.distributed.checkpoint.planner", "torch.distributed._shard.checkpoint.planner")
_PROPERTIES = (*_CHECKPOINT, "torch.distributed._shard.sharded_tensor.metadata")
_PATHS = ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")


def _table() -> dict[tuple[str, str], object]:
    """Fresh stand-ins for one load, by (module, name)."""

    def fresh(base: type) -> type:
        return _Sealed(base.__name__, (base,), {"__slots__": ()} if base is WireBox else {})

    table: dict[tuple[str, str], object] = {
        ("torch", "Size"): tuple,
        ("torch.serialization", "_get_layout"): fresh(WireLayout),
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
        (_CHECKPOINT, ("ChunkStorageMetadata",), WireBox),
        (_CHECKPOINT, ("MetadataIndex",), WireIndex),
        (_CHECKPOINT, ("StorageMeta",), WireStorageMeta),
        (_PROPERTIES, ("TensorProperties",), WireProperties),
        (_PROPERTIES, ("MEM_FORMAT_ENCODING", "_MEM_FORMAT_ENCODING"), WireEnum),
        (_FILESYSTEM, ("_StorageInfo",), WireStorageInfo),
        (_FILESYSTEM, ("_StoragePrefix",), WireInert),
        (_PLANNER, ("SavePlan", "WriteItem", "TensorWriteData"), WireInert),
        (_PLANNER, ("WriteItemType",), WireEnum),
        (("pathlib", "pathlib._local"), _PATHS, WirePath),
    ]
    for modules, names, base in known:
        stand_in = fresh(base)
        for module in modules:
            for name in names:
                table[module, name] = stand_in
    return table


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: io.BytesIO) -> None:
        super().__init__(data)
        self._table = _table()

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._table[module, name]
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


def load(data: bytes, file: str = ".metadata") -> WireMetadata:
    """Unpickle `.metadata` bytes into stand-ins.

    Args:
        data: the object's whole content.
        file: its name, for messages.

    Raises:
        MetadataError: ``metadata.empty``, ``metadata.unreadable`` or ``metadata.unsafe``.
    """
    if not data:
        raise MetadataError(f"{file} is empty", code="metadata.empty", file=file)
    try:
        with gc_paused():
            loaded = _Unpickler(io.BytesIO(data)).load()
    except MetadataError as error:
        error.file = file
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
