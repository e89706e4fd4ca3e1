"""How torch pickles tensors, recognised in nodes.

A tensor is a `Reduce` of one of torch's rebuild functions over a storage, which is a `PersistentRef`.
`tensor_of` reads such a node into a `TensorNode` and sees through the wrappings of parameters and of
tensors with attributes. `TYPED_STORAGES` and `UNTYPED_DTYPES` say by which of its two spellings torch
pickles a dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dcp.dtypes import ITEMSIZE
from dcp.errors import PickleError
from dcp.pickles.nodes import Call, Global, PersistentRef, Reduce, Value

TYPED_STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
    "qint8": "QInt8Storage",
    "qint32": "QInt32Storage",
    "quint8": "QUInt8Storage",
    "quint4x2": "QUInt4x2Storage",
    "quint2x4": "QUInt2x4Storage",
}
"""Dtypes that have a storage class of their own, which names them (`_rebuild_tensor_v2`)."""

UNTYPED_DTYPES = frozenset(
    {
        *("complex32", "uint16", "uint32", "uint64"),
        *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        "float4_e2m1fn_x2",
    }
)
"""Dtypes without one: pickled over an untyped storage with the dtype beside it (`_rebuild_tensor_v3`)."""

_DTYPE_OF = {storage: dtype for dtype, storage in TYPED_STORAGES.items()}
_WRAPPINGS = {
    "torch._utils._rebuild_parameter": 3,
    "torch._utils._rebuild_parameter_with_state": 4,
}
_QUANTIZED = "torch._utils._rebuild_qtensor"
_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
_REBUILD = {
    "torch._utils._rebuild_tensor": (4, 4),
    "torch._utils._rebuild_tensor_v2": (6, 7),
    "torch._utils._rebuild_tensor_v3": (7, 8),
}


@dataclass(frozen=True, slots=True)
class StorageNode:
    """A storage beside the pickle.

    Attributes:
        key: name of its bytes: entry ``data/<key>`` of the archive.
        dtype: element type, None if untyped.
        location: device tag, as "cpu".
        numel: length in elements; in bytes if untyped.
    """

    key: str
    dtype: str | None
    location: str
    numel: int

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.numel * (ITEMSIZE[self.dtype] if self.dtype else 1)


@dataclass(frozen=True, slots=True)
class TensorNode:
    """A tensor over a storage. Offset and strides count elements of ``dtype``.

    Attributes:
        conj: the stored elements are the complex conjugates of the tensor's.
        neg: the stored elements are the negatives of the tensor's.
        wrapping: names of what the plain tensor is wrapped in, outermost first.
    """

    storage: StorageNode
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool = False
    conj: bool = False
    neg: bool = False
    wrapping: tuple[str, ...] = ()

    @property
    def extent(self) -> int:
        """End of the last element used, in elements from the storage's start; the offset if there is none."""
        if 0 in self.shape:
            return self.offset
        steps = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.offset + steps + 1

    @property
    def contiguous(self) -> bool:
        """Whether the elements stand one after another in C order."""
        if 0 in self.shape:
            return True
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


def is_tensor(node: Value) -> bool:
    """Whether ``node`` is meant as a tensor over a storage; `tensor_of` reads it or says what is wrong."""
    while isinstance(node, Reduce) and isinstance(node.func, Global):
        name = str(node.func)
        if name in _REBUILD or name in _WRAPPINGS:
            return True
        if name != _FROM_TYPE or len(node.args) != 4:
            return False
        node = _inner(node)
    return False


def tensor_of(node: Value) -> TensorNode:
    """Read a tensor's node.

    Raises:
        PickleError: it is no tensor, or spelled in a way that torch does not.
    """
    wrapping: list[str] = []
    requires_grad: Value = None
    while True:
        if not isinstance(node, Reduce) or not isinstance(node.func, Global):
            raise _malformed("a tensor is expected where there is none")
        name = str(node.func)
        if name in _WRAPPINGS:
            if len(node.args) != _WRAPPINGS[name]:
                raise _malformed(f"{name} has {len(node.args)} arguments")
            if requires_grad is None:
                requires_grad = node.args[1]
            wrapping.append(name)
            node = node.args[0]
        elif name == _FROM_TYPE and len(node.args) == 4:
            wrapping.append(str(node.args[1]) if isinstance(node.args[1], Global) else name)
            node = _inner(node)
        else:
            break
    found = _plain(name, node.args)
    if isinstance(requires_grad, bool):
        found = replace(found, requires_grad=requires_grad)
    return replace(found, wrapping=tuple(wrapping))


def quantized_of(node: Value) -> tuple[str, tuple[int, ...]] | None:
    """Dtype and shape of a quantized tensor; None if it is none.

    Raises:
        PickleError: it is spelled in a way that torch does not.
    """
    if not isinstance(node, Reduce) or not node.calls(_QUANTIZED):
        return None
    if len(node.args) < 4 or not isinstance(node.args[0], PersistentRef):
        raise _malformed(f"{_QUANTIZED} has other arguments than torch gives it")
    storage = storage_of(node.args[0].pid)
    if storage.dtype is None:
        raise _malformed("a quantized tensor's storage has no type")
    return storage.dtype, _sizes(node.args[2])


def storage_of(pid: Value) -> StorageNode:
    """Read a storage's persistent id, ``("storage", type, key, location, elements)``.

    Raises:
        PickleError: it is none.
    """
    match pid:
        case ("storage", Global(module, name), str(key), str(location), int(numel)) if numel >= 0:
            if module in {"torch", "torch.cuda"} and name in _DTYPE_OF:
                return StorageNode(key, _DTYPE_OF[name], location, numel)
            if module in {"torch", "torch.storage"} and name == "UntypedStorage":
                return StorageNode(key, None, location, numel)
    raise _malformed("a persistent id is not one of a torch storage")


def _inner(node: Reduce) -> Value:
    func, _, args, _ = node.args
    if isinstance(func, Global | Call) and isinstance(args, tuple):
        return Reduce(func, args)
    return None


def _plain(name: str, args: tuple[Value, ...]) -> TensorNode:
    if name not in _REBUILD:
        raise _malformed(f"{name} does not make a tensor over a storage")
    fewest, most = _REBUILD[name]
    if not fewest <= len(args) <= most:
        raise _malformed(f"{name} has {len(args)} arguments")
    if not isinstance(args[0], PersistentRef):
        raise _malformed("a tensor's storage is not a persistent id")
    storage = storage_of(args[0].pid)
    dtype = storage.dtype or "uint8"
    if fewest == 7:
        if not isinstance(args[6], Global) or args[6].module != "torch" or args[6].name not in ITEMSIZE:
            raise _malformed("a tensor's dtype is not one of torch's")
        dtype = args[6].name
    shape, strides = _sizes(args[2]), _sizes(args[3])
    offset = args[1]
    if type(offset) is not int or offset < 0 or len(shape) != len(strides):
        raise _malformed("a tensor's shape, strides and offset do not fit together")
    flags = args[-1] if len(args) == most and fewest > 4 else {}
    if not isinstance(flags, dict) or not all(type(flag) is bool for flag in flags.values()):
        raise _malformed("a tensor's metadata is not a dict of flags")
    return TensorNode(
        storage,
        dtype,
        offset,
        shape,
        strides,
        requires_grad=fewest > 4 and args[4] is True,
        conj=flags.get("conj", False),
        neg=flags.get("neg", False),
    )


def _sizes(value: Value) -> tuple[int, ...]:
    if isinstance(value, Reduce) and value.calls("torch.Size") and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, tuple | list) or not all(type(n) is int and n >= 0 for n in value):
        raise _malformed("a tensor's shape or strides are not numbers from 0 upwards")
    return tuple(value)


def _malformed(why: str) -> PickleError:
    return PickleError(why, code="records.undecodable")
