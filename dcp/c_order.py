"""The elements of a tensor as its record holds them, put into C order.

A `TensorNode` says how they stand in its storage: strides, and the conjugate and negative bits that torch
leaves to whoever reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp.dtypes import ITEMSIZE
from dcp.pickles.tensors import TensorNode

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def in_c_order(storage: memoryview, tensor: TensorNode) -> bytes:
    """A tensor's elements as bytes in C order, its strides, conjugate and negative bits resolved.

    Args:
        storage: the bytes of its storage, long enough for its extent.
        tensor: shape and strides in elements.
    """
    import numpy as np

    item = ITEMSIZE[tensor.dtype]
    if 0 in tensor.shape:
        return b""
    raw = np.frombuffer(storage, dtype=np.uint8, offset=tensor.offset * item)
    if len(raw) % item:
        raw = raw[: len(raw) - len(raw) % item]
    elements = raw.view(f"V{item}")
    strided = np.lib.stride_tricks.as_strided(
        elements, tensor.shape, tuple(stride * item for stride in tensor.strides), writeable=False
    )
    values = np.ascontiguousarray(strided)
    if tensor.conj or tensor.neg:
        values = _resolve(values.copy(), tensor)
    return values.tobytes()


def _resolve(values: NDArray[np.void], tensor: TensorNode) -> NDArray[np.void]:
    """Undo lazy conjugation and negation by flipping sign bits, which is exact for NaN and zero too."""
    import numpy as np

    item = ITEMSIZE[tensor.dtype]
    is_complex = tensor.dtype.startswith("complex")
    parts = values.reshape(-1).view(f"u{item // 2 if is_complex else item}")
    sign = np.array(1 << (8 * parts.itemsize - 1), parts.dtype)
    if tensor.conj:
        parts[1::2] ^= sign
    if tensor.neg:
        parts ^= sign
    return values
