"""Tensors on their way out: which of them, under which name, and their bytes in order with a digest each.

Both formats take tensors from here one after another; what differs between them is what stands around the
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from dcp.dtypes import ITEMSIZE
from dcp.exporting.bands import Band, bands, with_few_pieces
from dcp.exporting.casts import cast
from dcp.exporting.pump import Pump
from dcp.exporting.report import ExportedTensor
from dcp.index import TensorEntry

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True)
class OutTensor:
    """One tensor of the output."""

    entry: TensorEntry
    name: str
    """Dotted name in the output."""
    dtype: str
    """Element type in the output, by torch's name."""

    @property
    def nbytes(self) -> int:
        """Bytes in the output."""
        return prod(self.entry.shape) * ITEMSIZE[self.dtype]


class TensorStream:
    """Reads tensors in a given order.

    Attributes:
        tensors: those that have passed whole, with digests.
    """

    def __init__(self, pump: Pump, order: Iterable[OutTensor]) -> None:
        self.pump = pump
        self.tensors: dict[str, ExportedTensor] = {}
        self._filled = pump.run(self._jobs(order))

    def _jobs(self, order: Iterable[OutTensor]) -> Iterator[tuple[TensorEntry, Band]]:
        for tensor in order:
            for band in bands(tensor.entry, with_few_pieces(tensor.entry, self.pump.band_bytes)):
                yield tensor.entry, band

    def pieces(self, tensor: OutTensor) -> Iterator[tuple[memoryview, int | None]]:
        """The next tensor's bytes as they go out, with their CRC-32 where it is known.

        Each piece is valid until the next one is taken.

        Raises:
            CheckpointError: a chunk is damaged.
            StorageError: the store failed.
        """
        import xxhash

        digest = xxhash.xxh3_128()
        source = tensor.entry.dtype
        left = tensor.entry.nbytes
        overflowed = 0
        while left:
            filled = next(self._filled)
            for fault in filled.faults:
                raise fault
            left -= filled.band.nbytes
            if source == tensor.dtype:
                digest.update(filled.view)
                yield filled.view, filled.crc32
            else:
                view, infinite = cast(filled.view, source, tensor.dtype)
                overflowed += infinite
                digest.update(view)
                yield view, None
        self.tensors[tensor.name] = ExportedTensor(
            shape=list(tensor.entry.shape),
            dtype=tensor.dtype,
            digest=digest_text(digest.hexdigest()),
            cast_from=source if source != tensor.dtype else None,
            overflowed=overflowed,
        )

    def finish(self) -> None:
        """Let the readers end; everything must have been taken."""
        for _ in self._filled:
            raise AssertionError("more was read than is written")


def digest_text(hexadecimal: str) -> str:
    """A tensor's digest as reports and manifests spell it."""
    return f"xxh3-128:{hexadecimal}"


def content_of(order: Sequence[OutTensor]) -> int:
    """Bytes of all tensors in the output."""
    return sum(tensor.nbytes for tensor in order)
