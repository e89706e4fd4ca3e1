"""A nested state with tensors in it, to what a `torch.save` file holds: one pickle, and storages in order.

`TensorSpec` stands for a tensor whose bytes come later; several over one `Storage` are tied or are views
of each other, as in torch. `build_state` pickles the state exactly as `torch.save` does and says which
storages follow. Everything else in the state is plain values and nodes (`dcp.pickles`); where a node from
another pickle refers to a storage, a `StorageRef` stands for it: read that pickle with
``persistent=lambda pid: StorageRef(...)``.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from math import prod

from dcp.dtypes import ITEMSIZE
from dcp.errors import UsageError
from dcp.pickles.nodes import Global, PersistentRef, Reduce, Value
from dcp.pickles.tensors import TYPED_STORAGES, UNTYPED_DTYPES
from dcp.pickles.writer import write

_REBUILD_TYPED = Global("torch._utils", "_rebuild_tensor_v2")
_REBUILD_UNTYPED = Global("torch._utils", "_rebuild_tensor_v3")
_UNTYPED = Global("torch.storage", "UntypedStorage")
_TYPED = {dtype: Global("torch", storage) for dtype, storage in TYPED_STORAGES.items()}
_DTYPES = {dtype: Global("torch", dtype) for dtype in UNTYPED_DTYPES}


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """A stretch of bytes that tensors share; two of them are never the same one.

    Attributes:
        nbytes: its length.
    """

    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class StorageRef:
    """A storage as a pickle refers to it.

    Attributes:
        dtype: its element type; None for an untyped storage.
    """

    storage: Storage
    dtype: str | None


@dataclass(frozen=True, slots=True, eq=False)
class TensorSpec:
    """A tensor over a storage. Offset and strides count elements.

    Attributes:
        dtype: torch's name for it, as ``bfloat16``.
        offset: of the first element, from the storage's start.
        strides: of each dimension.
        conj, neg: the stored elements are the conjugates, or the negatives, of the tensor's.
    """

    dtype: str
    shape: tuple[int, ...]
    storage: Storage
    strides: tuple[int, ...]
    offset: int = 0
    requires_grad: bool = False
    conj: bool = False
    neg: bool = False

    @classmethod
    def contiguous(cls, dtype: str, shape: tuple[int, ...], storage: Storage | None = None) -> TensorSpec:
        """A tensor in C order over the whole of a storage, a new one if none is given."""
        made = storage or Storage(prod(shape) * ITEMSIZE[dtype])
        return cls(dtype, shape, made, contiguous_strides(shape))


@dataclass(frozen=True, slots=True)
class TorchState:
    """What a `torch.save` file holds.

    Attributes:
        pickle: the content of ``data.pkl``.
        storages: key and storage, in file order; keys count from "0".
    """

    pickle: bytes
    storages: tuple[tuple[str, Storage], ...]

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """Key and bytes of each storage, as `dcp.exporting.torch_file` takes them."""
        return tuple((key, storage.nbytes) for key, storage in self.storages)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a tensor in C order, as torch gives them: a dimension of size 0 counts as 1."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def build_state(state: Value) -> TorchState:
    """Pickle ``state``, which may hold `TensorSpec` and `StorageRef`, as `torch.save` would.

    Raises:
        UsageError: a dtype that torch cannot save, one storage used with two dtypes, a tensor that
            reaches beyond its storage, or a value that has no spelling.
    """
    builder = _Builder()
    pickle = write(state, expand=builder.expand)
    return TorchState(pickle, tuple((key, storage) for storage, (key, _) in builder.keys.items()))


class _Builder:
    def __init__(self) -> None:
        self.keys: dict[Storage, tuple[str, str | None]] = {}  # -> key, dtype

    def expand(self, value: object) -> Value:
        """What torch's pickler makes of a tensor or storage."""
        if isinstance(value, TensorSpec):
            return self._tensor(value)
        if isinstance(value, StorageRef):
            return self._storage(value.storage, value.dtype)
        raise UsageError(f"a {type(value).__name__} has no spelling in a pickle of plain values and tensors")

    def _storage(self, storage: Storage, dtype: str | None) -> PersistentRef:
        key, known = self.keys.setdefault(storage, (str(len(self.keys)), dtype))
        if known != dtype and storage.nbytes:
            both = f"{known or 'bytes'} and as {dtype or 'bytes'}"
            raise UsageError(f"one storage is used both as {both}; torch saves no such state")
        if dtype is None:
            return PersistentRef(("storage", _UNTYPED, key, "cpu", storage.nbytes))
        return PersistentRef(("storage", _TYPED[dtype], key, "cpu", storage.nbytes // ITEMSIZE[dtype]))

    def _tensor(self, tensor: TensorSpec) -> Reduce:
        typed = tensor.dtype in TYPED_STORAGES
        if not typed and tensor.dtype not in UNTYPED_DTYPES:
            raise UsageError(f"torch cannot save tensors of type {tensor.dtype}")
        _check_extent(tensor)
        # torch makes each of these anew for each tensor; what is made anew is written anew.
        flags: dict[Value, Value] = {
            "".join(name): True for name, is_set in (("neg", tensor.neg), ("conj", tensor.conj)) if is_set
        }
        return Reduce(
            _REBUILD_TYPED if typed else _REBUILD_UNTYPED,
            (
                self._storage(tensor.storage, tensor.dtype if typed else None),
                tensor.offset,
                (*tensor.shape,),
                (*tensor.strides,),
                tensor.requires_grad,
                OrderedDict(),
                *(() if typed else (_DTYPES[tensor.dtype],)),
                *((flags,) if flags else ()),
            ),
        )


def _check_extent(tensor: TensorSpec) -> None:
    used = 0
    if 0 not in tensor.shape:
        steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
        used = (tensor.offset + steps + 1) * ITEMSIZE[tensor.dtype]
    if used > tensor.storage.nbytes:
        raise UsageError(f"a tensor takes {used:,} bytes of a storage of {tensor.storage.nbytes:,}")
