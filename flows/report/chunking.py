"""How tensors are cut into chunks, for the tiling map: every different way once, small enough for a page.

Layers of a model are cut alike, so tensors share a `Pattern`; 10,000 keys have a few hundred of them. What
would still not fit the budget is drawn coarsely: chunks are counted in the cells of a grid.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dcp.columns import BoxColumns, RecordColumns
from dcp.index import TensorEntry
from flows.report.packing import EXACT, Packed, pack_columns

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

BUDGET = 2_000_000
"""Characters that all packed chunks of a page may take."""
_POOL = 1 << 16
"""Chunks packed together at most, unless one pattern alone has more."""
_CELLS = (1024, 384, 128, 48)
"""Cells of a coarse grid along one dimension: the most of these that fit, so that there is something to go
into, or else the last."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Chunks of one tensor. ``offsets`` and ``sizes`` have shape (chunks, dimensions), in elements."""

    shape: tuple[int, ...]
    offsets: Ints
    sizes: Ints
    file: Ints
    """Number of the object that each stands in; -1 where the index names none."""
    begin: Ints
    """First byte of each one's record within its object."""
    stored: Ints
    """Bytes of each one's record."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """Where the rows of one way to cut a tensor stand: ``rows`` rows from ``start`` on, in pool ``pool``.

    A row is offset and size in each dimension, the number of the file, and, if ``coarse``, how many chunks
    the cell stands for.
    """

    pool: int
    start: int
    rows: int
    coarse: bool


@dataclass(frozen=True, slots=True)
class Tilings:
    """All ways in which tensors are cut."""

    patterns: tuple[Pattern, ...]
    pools: tuple[Packed, ...]


@dataclass(slots=True)
class Patterns:
    """Collects patterns; `number` tells a tensor's, `packed` makes them fit."""

    _numbers: dict[bytes, int] = field(default_factory=dict)
    _columns: list[Columns] = field(default_factory=list)

    def number(self, columns: Columns) -> int:
        """The number of the pattern that a tensor is cut in; -1 if a browser could not count that far."""
        if any(extent >= EXACT for extent in columns.shape) or not _countable(columns):
            return -1
        digest = hashlib.blake2b(repr(columns.shape).encode())
        for column in (columns.offsets, columns.sizes, columns.file):
            digest.update(column.tobytes())
        known = digest.digest()
        if known not in self._numbers:
            self._numbers[known] = len(self._columns)
            self._columns.append(columns)
        return self._numbers[known]

    def packed(self, budget: int = BUDGET) -> Tilings:
        """All patterns, those with the fewest chunks whole; from where the budget ends on, coarsely."""
        by_size = sorted(range(len(self._columns)), key=lambda number: len(self._columns[number].file))
        patterns: dict[int, Pattern] = {}
        pools: list[Packed] = []
        left = budget
        waiting: dict[int, list[int]] = {}

        def close(dims: int) -> None:
            nonlocal left
            members = waiting.pop(dims, [])
            if not members:
                return
            pool = _pool([self._columns[number] for number in members], coarse=False)
            coarse = len(pool.data) > left
            chosen = [self._columns[number] for number in members]
            if coarse:
                # More cells than chunks count nothing together.
                most = max(len(self._columns[number].file) for number in members)
                for cells in [each for each in _CELLS if each < most] or _CELLS[-1:]:
                    chosen = [_coarse(self._columns[number], cells) for number in members]
                    pool = _pool(chosen, coarse=True)
                    # Half, for those that come after it.
                    if len(pool.data) <= left // 2:
                        break
            left -= len(pool.data)
            start = 0
            for number, each in zip(members, chosen, strict=True):
                patterns[number] = Pattern(len(pools), start, len(each.file), coarse)
                start += len(each.file)
            pools.append(pool)

        held: dict[int, int] = {}
        for number in by_size:
            columns = self._columns[number]
            dims = len(columns.shape)
            if held.get(dims, 0) + len(columns.file) > _POOL:
                close(dims)
                held[dims] = 0
            waiting.setdefault(dims, []).append(number)
            held[dims] = held.get(dims, 0) + len(columns.file)
        for dims in list(waiting):
            close(dims)
        return Tilings(tuple(patterns[number] for number in range(len(self._columns))), tuple(pools))


def columns_of(entry: TensorEntry, files: Mapping[str, int]) -> Columns:
    """The chunks of a tensor that have its number of dimensions, as columns; ``files`` numbers objects."""
    import numpy as np

    dims = len(entry.shape)
    boxes, records = entry.chunks.boxes, entry.chunks.records
    if (
        isinstance(boxes, BoxColumns)
        and isinstance(records, RecordColumns)
        and boxes.offsets.shape[1] == dims
    ):
        numbers = np.array([files.get(path, -1) for path, _ in records.places] + [-1], np.int64)
        file = numbers[records.place]
        return Columns(entry.shape, boxes.offsets, boxes.sizes, file, records.offset, records.length)
    pairs = zip(boxes, records, strict=True)
    fitting = [(box, record) for box, record in pairs if len(box.offsets) == len(box.sizes) == dims]
    rows = len(fitting)
    limit = EXACT - 1

    def matrix(values: Sequence[Sequence[int]]) -> Ints:
        clipped = [[max(-limit, min(limit, each)) for each in row] for row in values]
        return np.array(clipped, np.int64).reshape(rows, dims)

    return Columns(
        entry.shape,
        matrix([box.offsets for box, _ in fitting]),
        matrix([box.sizes for box, _ in fitting]),
        np.array([files.get(record.path, -1) if record else -1 for _, record in fitting], np.int64),
        np.array([max(-1, min(record.offset, limit)) if record else 0 for _, record in fitting], np.int64),
        np.array([min(record.length, limit) if record else 0 for _, record in fitting], np.int64),
    )


def _countable(columns: Columns) -> bool:
    both = (columns.offsets, columns.sizes)
    return all(not each.size or (int(each.min()) > -EXACT and int(each.max()) < EXACT) for each in both)


def _pool(members: Sequence[Columns], *, coarse: bool) -> Packed:
    import numpy as np

    dims = len(members[0].shape)
    columns = [np.concatenate([m.offsets[:, d] for m in members]) for d in range(dims)]
    columns += [np.concatenate([m.sizes[:, d] for m in members]) for d in range(dims)]
    columns.append(np.concatenate([m.file for m in members]))
    if coarse:
        columns.append(np.concatenate([m.stored for m in members]))
    return pack_columns(columns)


def _coarse(columns: Columns, most: int) -> Columns:
    """At most ``most`` cells of each of the two dimensions with most cuts: who wrote most there, how many."""
    import numpy as np

    dims = len(columns.shape)
    if not dims or not len(columns.file):
        return Columns(
            columns.shape,
            columns.offsets,
            columns.sizes,
            columns.file,
            columns.begin,
            np.ones_like(columns.file),
        )
    cuts = [len(np.unique(columns.offsets[:, d])) for d in range(dims)]
    chosen = sorted(range(dims), key=lambda d: -cuts[d])[:2]
    cell = np.zeros(len(columns.file), np.int64)
    edges: dict[int, Ints] = {}
    for d in chosen:
        cells = max(1, min(most, cuts[d], columns.shape[d]))
        edges[d] = np.linspace(0, columns.shape[d], cells + 1).astype(np.int64)
        middle = columns.offsets[:, d] + columns.sizes[:, d] // 2
        inside = np.clip(np.searchsorted(edges[d], middle, side="right") - 1, 0, cells - 1)
        cell = cell * cells + inside
    files = int(columns.file.max()) + 2
    both, count = np.unique(cell * files + columns.file + 1, return_counts=True)
    total = np.bincount(both // files, weights=count).astype(np.int64)
    # The last of equal keys in this order is the file with most chunks of the cell.
    order = np.lexsort((count, both // files))
    last = np.append(np.diff(both[order] // files) != 0, True)
    winners = both[order][last]
    cells_seen = winners // files
    offsets = np.zeros((len(winners), dims), np.int64)
    sizes = np.tile(np.array(columns.shape, np.int64), (len(winners), 1))
    rest = cells_seen.copy()
    for d in reversed(chosen):
        cells = len(edges[d]) - 1
        at = rest % cells
        rest //= cells
        offsets[:, d] = edges[d][at]
        sizes[:, d] = edges[d][at + 1] - edges[d][at]
    nowhere = np.zeros(len(winners), np.int64)
    return Columns(columns.shape, offsets, sizes, winners % files - 1, nowhere, total[cells_seen])
