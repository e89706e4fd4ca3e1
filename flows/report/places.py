"""Where in the files the chunks of every key stand: byte ranges, packed within a budget of their own.

A range is told by how far it begins behind the end of the one before it of the same tensor in the same
file, or, where it is the first there, behind the beginning of the file. Writers that write alike make that
one number for all chunks of a tensor, which packs well. ``templates/report/js/data.js`` adds it up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flows.report.packing import EXACT, Packed, pack_columns

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from dcp.record import Record

    Ints = npt.NDArray[np.int64]

BUDGET = 800_000
"""Characters that all packed ranges of a page may take."""
_POOL = 1 << 16
"""Ranges packed together at most, unless one key alone has more."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """Bytes ``begin <= i < begin + length`` of each chunk of one key; all three have shape (chunks,)."""

    file: Ints
    """Number of the object; -1 where the index names none, and then there is no range."""
    begin: Ints
    length: Ints

    @classmethod
    def one(cls, file: int, record: Record | None) -> Ranges:
        """The range of a lone record."""
        import numpy as np

        numbers = (file, record.offset if record else 0, record.length if record else 0)
        return cls(*(np.array([max(-1, min(each, EXACT))], np.int64) for each in numbers))

    def beyond(self, sizes: Ints) -> bool:
        """Whether one of them ends behind its object, by the sizes that `sizes_of` gives."""
        ends = sizes[self.file]
        return bool(((self.begin + self.length > ends) & (self.length > 0) | (ends < 0)).any())

    @property
    def countable(self) -> bool:
        """Whether a browser can count that far."""
        return all(
            # An end is the sum of two, and what is packed the difference of differences of ends.
            not len(each) or (int(each.min()) >= 0 and int(each.max()) < EXACT // 4)
            for each in (self.begin, self.length)
        )


def sizes_of(files: Iterable[int]) -> Ints:
    """Bytes of each object by its number, -1 of one that is absent; the last is for those that have none."""
    import numpy as np

    return np.array([*files, EXACT], np.int64)


@dataclass(frozen=True, slots=True)
class Places:
    """All ranges that fit. A pool has two columns, how far behind and how long, and a row for each chunk."""

    starts: tuple[int, ...]
    """By key: the row, counted through all pools, of its first chunk; -1 if its ranges are not there."""
    pools: tuple[Packed, ...]


def pack_places(keys: Sequence[Ranges | None], budget: int = BUDGET) -> Places:
    """Pack the ranges of keys, those with the fewest chunks first, until the budget ends.

    Args:
        keys: by key; None for those whose chunks the page does not show one by one.
    """
    starts = [-1] * len(keys)
    pools: list[Packed] = []
    row, left = 0, budget
    for members in _batches(keys):
        held = [(number, ranges) for number in members if (ranges := keys[number]) is not None]
        pool = _pool([ranges for _, ranges in held])
        if len(pool.data) > left:
            break
        left -= len(pool.data)
        pools.append(pool)
        for number, ranges in held:
            starts[number] = row
            row += len(ranges.file)
    return Places(tuple(starts), tuple(pools))


def _batches(keys: Sequence[Ranges | None]) -> list[list[int]]:
    sizes = {
        number: len(ranges.file)
        for number, ranges in enumerate(keys)
        if ranges is not None and len(ranges.file) and ranges.countable
    }
    batches: list[list[int]] = []
    held = _POOL
    for number in sorted(sizes, key=lambda number: sizes[number]):
        if held + sizes[number] > _POOL:
            batches.append([])
            held = 0
        batches[-1].append(number)
        held += sizes[number]
    return batches


def _pool(members: Sequence[Ranges]) -> Packed:
    import numpy as np

    file = np.concatenate([each.file for each in members])
    begin = np.concatenate([each.begin for each in members])
    length = np.concatenate([each.length for each in members])
    key = np.repeat(np.arange(len(members)), [len(each.file) for each in members])
    order = np.lexsort((file, key))
    follows = (np.diff(key[order], prepend=-1) == 0) & (np.diff(file[order], prepend=-2) == 0)
    ends = np.roll((begin + length)[order], 1)
    behind = np.empty_like(begin)
    behind[order] = begin[order] - np.where(follows, ends, 0)
    return pack_columns([behind, length])
