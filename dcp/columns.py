"""Boxes and records by the million, as columns of numbers instead of objects.

`BoxColumns` and `RecordColumns` are sequences that make a `Box` or a `Record` when one is asked for; their
arrays are there for whatever looks at all of them at once. Only indices with long lists of chunks have
them, and only these cost the import of numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, overload

from dcp.boxes import Box
from dcp.record import Record

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

_BLOCK = 4096

Place = tuple[str, tuple[str, ...]]
"""Path and transforms of a record, which many records share."""


class _Columns:
    """Equality and hash of a sequence by what it holds, alike for tuples and columns."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple | _Columns):
            return NotImplemented
        mine: Sequence[Any] = self  # type: ignore[assignment]
        theirs: Sequence[Any] = other  # type: ignore[assignment]
        return len(mine) == len(theirs) and all(a == b for a, b in zip(mine, theirs, strict=True))

    def __hash__(self) -> int:
        items: Sequence[Any] = self  # type: ignore[assignment]
        return hash(tuple(items))


class BoxColumns(_Columns, Sequence[Box]):
    """Boxes of one rank: ``offsets`` and ``sizes`` are int64 arrays of shape (boxes, rank), in elements."""

    __slots__ = ("offsets", "sizes")

    def __init__(self, offsets: Ints, sizes: Ints) -> None:
        self.offsets = offsets
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, i: int) -> Box: ...
    @overload
    def __getitem__(self, i: slice) -> BoxColumns: ...
    def __getitem__(self, i: int | slice) -> Box | BoxColumns:
        if isinstance(i, slice):
            return BoxColumns(self.offsets[i], self.sizes[i])
        return Box(tuple(self.offsets[i].tolist()), tuple(self.sizes[i].tolist()))

    def __iter__(self) -> Iterator[Box]:
        return chain.from_iterable(
            map(
                Box,
                map(tuple, self.offsets[at : at + _BLOCK].tolist()),
                map(tuple, self.sizes[at : at + _BLOCK].tolist()),
            )
            for at in range(0, len(self), _BLOCK)
        )


class RecordColumns(_Columns, Sequence["Record | None"]):
    """Records, or None for those that are missing.

    Attributes:
        places: path and transforms by number.
        place: number of each record's place, -1 if the record is missing.
        offset: first byte of each within its object.
        length: bytes of each.
    """

    __slots__ = ("length", "offset", "place", "places")

    def __init__(
        self, places: Sequence[Place], place: npt.NDArray[np.int32], offset: Ints, length: Ints
    ) -> None:
        self.places = places
        self.place = place
        self.offset = offset
        self.length = length

    def __len__(self) -> int:
        return len(self.place)

    @overload
    def __getitem__(self, i: int) -> Record | None: ...
    @overload
    def __getitem__(self, i: slice) -> RecordColumns: ...
    def __getitem__(self, i: int | slice) -> Record | RecordColumns | None:
        if isinstance(i, slice):
            return RecordColumns(self.places, self.place[i], self.offset[i], self.length[i])
        return self._record(int(self.place[i]), int(self.offset[i]), int(self.length[i]))

    def __iter__(self) -> Iterator[Record | None]:
        for at in range(0, len(self), _BLOCK):
            block = slice(at, at + _BLOCK)
            yield from map(
                self._record,
                self.place[block].tolist(),
                self.offset[block].tolist(),
                self.length[block].tolist(),
            )

    @staticmethod
    def tally(columns: Sequence[RecordColumns]) -> Iterator[tuple[str, int]]:
        """Paths with how many of the records stand there; a path may come more than once."""
        shared: dict[int, list[RecordColumns]] = {}
        for records in columns:
            shared.setdefault(id(records.places), []).append(records)
        for group in shared.values():
            import numpy as np

            place = np.concatenate([records.place for records in group])
            counts = np.bincount(place[place >= 0])
            for number in counts.nonzero()[0].tolist():
                yield group[0].places[number][0], int(counts[number])

    def _record(self, place: int, offset: int, length: int) -> Record | None:
        if place < 0:
            return None
        path, transforms = self.places[place]
        return Record(path, offset, length, transforms)
