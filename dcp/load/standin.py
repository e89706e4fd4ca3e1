"""A stand-in for a sharded tensor of one rank, without a process group and without memory.

`StandIn` is a wrapper subclass with the global shape and dtype. It answers the two questions that
torch's planners put to a sharded tensor (``__create_chunk_list__``, ``__get_tensor_shard__``) from its
`pieces`: the rank's shard, cut into bands. A piece has memory only between the first read into it and
`release`; it begins filled with `POISON`, because memory that is merely uninitialised may still hold
the very values that are expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Never

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from dcp.boxes import Box, Shape
from dcp.load.metadata import torch_chunk

POISON = 0xA5
"""The byte every element is made of before it is loaded."""
_ALIGNMENT = 64


def poisoned(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """A new tensor of nothing but poison."""
    return _filled(torch.empty(prod(shape) * dtype.itemsize, dtype=torch.uint8), shape, dtype)


def _filled(raw: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    raw.numpy().fill(POISON)  # several times as fast as torch's fill_
    return raw.view(dtype).view(shape)


class Arena:
    """Memory for the pieces of one band at a time, used again for the next: fresh pages are slow to touch."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def poisoned(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of nothing but poison, for use until `reset`."""
        size = prod(shape) * dtype.itemsize
        if self._used + size > self._block.numel():
            # What was handed out of the old block keeps it alive until it is dropped.
            self._block = torch.empty(2 * (self._used + size), dtype=torch.uint8)
            self._used = 0
        raw = self._block[self._used : self._used + size]
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return _filled(raw, shape, dtype)

    def reset(self) -> None:
        """Take everything back; tensors handed out must not be used any more."""
        self._used = 0


class StandIn(torch.Tensor):
    """One rank's view of one tensor.

    Attributes:
        pieces: disjoint regions of the tensor that the rank holds, in elements.
        arena: where their memory comes from.
        memory: tensors of the pieces in use, by the piece's number.
    """

    pieces: Sequence[Box]
    arena: Arena
    memory: dict[int, torch.Tensor]

    @staticmethod
    def __new__(cls, shape: Shape, dtype: torch.dtype, pieces: Sequence[Box], arena: Arena) -> StandIn:
        made: StandIn = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=torch.device("cpu")
        )
        made.pieces = pieces
        made.arena = arena
        made.memory = {}
        return made

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [torch_chunk(piece) for piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        number = self.number_of(index)
        if number not in self.memory:
            self.memory[number] = self.arena.poisoned(self.pieces[number].sizes, self.dtype)
        return self.memory[number]

    def number_of(self, index: MetadataIndex) -> int:
        """The number of the piece that a read item's destination names.

        Raises:
            LookupError: there is no such piece.
        """
        offset = None if index.offset is None else tuple(index.offset)
        hint = index.index
        if hint is not None and 0 <= hint < len(self.pieces) and self.pieces[hint].offsets == offset:
            return hint
        for number, piece in enumerate(self.pieces):
            if piece.offsets == offset:
                return number
        raise LookupError(f"no piece of {index.fqn} stands at {offset}")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Never:
        raise NotImplementedError(f"a stand-in has no values: {func} cannot be computed")
