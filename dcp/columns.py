"""Boxes and records by the million, as columns of numbers instead of objects.

`BoxColumns` and `RecordColumns` are sequences that make a `Box` or a `Record` when one is asked for; their
arrays are there for whatever looks at all of them at once. Only indices with long lists of chunks have
them, and only these cost the import of numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, overload

from dcp.boxes import Box, Shape
from dcp.record import Record

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

_BLOCK = 4096
_LARGEST = (1 << 63) - 1

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

    def all_within(self, shape: Shape) -> bool:
        """Whether every box has the rank of ``shape`` and lies inside it, as `dcp.boxes.in_bounds` says."""
        if self.offsets.shape[1] != len(shape):
            return False
        for dim, extent in enumerate(shape):
            # No number of 64 bits goes beyond it, and none may be added up to one that does.
            limit = min(extent, _LARGEST)
            offsets, sizes = self.offsets[:, dim], self.sizes[:, dim]
            if len(offsets) and (offsets.min() < 0 or sizes.min() < 0 or sizes.max() > limit):
                return False
            if (offsets > limit - sizes).any():
                return False
        return True

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

    def stored(self) -> tuple[set[str], int, int]:
        """Objects that the records stand in, how many records there are, and the bytes of all of them."""
        import numpy as np

        present = np.unique(self.place[self.place >= 0]).tolist()
        paths = {self.places[place][0] for place in present}
        held = [1] * len(self.places)
        return paths, int((self.place >= 0).sum()), self.capacity(held)

    def transformed(self) -> bool:
        """Whether any record may be stored in another form than it is."""
        return any(transforms for _, transforms in self.places)

    def capacity(self, factors: Sequence[int]) -> int:
        """Lengths of all records added up, each times the factor of its place."""
        import numpy as np

        # Place -1, of a record that is missing, finds the last factor.
        factor_of = np.array([*factors, 0], np.int64)[self.place]
        total = 0
        for factor in set(factors):
            lengths = self.length[factor_of == factor]
            # Halves, since the sum of many lengths of 64 bits may need more.
            total += factor * (int((lengths >> 32).sum()) * (1 << 32) + int((lengths & 0xFFFFFFFF).sum()))
        return total

    def first(self) -> tuple[str, int] | None:
        """Path and offset of the record that comes first, by path and then by offset."""
        held = set(self.place.tolist()) - {-1}
        if not held:
            return None
        path = min(self.places[place][0] for place in held)
        offsets = [self.offset[self.place == p].min() for p in held if self.places[p][0] == path]
        return path, int(min(offsets))

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
