"""Which records stand in each file of a checkpoint, gathered from the index.

`uses` gives a `FileUse` a file. Where the index keeps records in columns they stay in columns: what a check
needs of a file that is in order costs a few numpy operations, and `FileUse.placed` makes the records only
of a file that is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcp.columns import RecordColumns
from dcp.index import CheckpointIndex, ObjectEntry
from dcp.record import Record

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Placed = tuple[Record, str]
"""A record and the key it belongs to."""

_LIMIT = 1 << 62
"""Numbers below this can be added once without leaving 64 bits."""


@dataclass(frozen=True, slots=True)
class FileUse:
    """The records in one file."""

    first_key: str
    records: int
    end: int
    """Largest exclusive end of a record, in bytes."""
    placed: Callable[[], list[Placed]]
    """Makes the records, in index order."""
    fits: Callable[[int], bool]
    """Whether they are proven to lie apart within so many bytes; False proves nothing."""


def uses(index: CheckpointIndex) -> dict[str, FileUse]:
    """Every file that ``index`` refers to, in the order in which it does so first."""
    if any(isinstance(entry.chunks.records, RecordColumns) for entry in index.tensors):
        gathered = _Gathered(index)
        if gathered.bounded:
            return gathered.uses()
    by_file: dict[str, list[Placed]] = {}
    for key, record in index.records():
        by_file.setdefault(record.path, []).append((record, key))
    return {path: _plain(placed) for path, placed in by_file.items()}


def _plain(placed: list[Placed]) -> FileUse:
    return FileUse(
        placed[0][1],
        len(placed),
        max(record.end for record, _ in placed),
        lambda: list(placed),
        lambda _: False,
    )


class _Gathered:
    """All records of an index as columns, sorted by file."""

    def __init__(self, index: CheckpointIndex) -> None:
        import numpy as np

        self.paths: list[str] = []
        self.keys: list[str] = list(index.entries)
        numbers: dict[str, int] = {}
        translated: dict[int, npt.NDArray[np.int32]] = {}

        def number(path: str) -> int:
            if path not in numbers:
                numbers[path] = len(self.paths)
                self.paths.append(path)
            return numbers[path]

        file: list[npt.NDArray[np.int32]] = []
        key: list[npt.NDArray[np.int32]] = []
        offset: list[npt.NDArray[np.int64]] = []
        length: list[npt.NDArray[np.int64]] = []
        self.bounded = True
        for at, entry in enumerate(index.entries.values()):
            records = (entry.record,) if isinstance(entry, ObjectEntry) else entry.chunks.records
            if isinstance(records, RecordColumns):
                table = translated.get(id(records.places))
                if table is None:
                    table = np.array([number(path) for path, _ in records.places], np.int32)
                    translated[id(records.places)] = table
                there = records.place >= 0
                whole = bool(there.all())
                file.append(table[records.place if whole else records.place[there]])
                offset.append(records.offset if whole else records.offset[there])
                length.append(records.length if whole else records.length[there])
            else:
                present = [record for record in records if record is not None]
                if any(max(abs(r.offset), abs(r.length)) >= _LIMIT for r in present):
                    self.bounded = False
                    return
                file.append(np.array([number(record.path) for record in present], np.int32))
                offset.append(np.array([record.offset for record in present], np.int64))
                length.append(np.array([record.length for record in present], np.int64))
            key.append(np.full(len(file[-1]), at, np.int32))
        files = np.concatenate(file)
        order = np.argsort(files, kind="stable")
        self.rank = order
        """Where each row stood in index order."""
        self.file = files[order]
        self.key = np.concatenate(key)[order]
        self.offset = np.concatenate(offset)[order]
        self.length = np.concatenate(length)[order]
        self.bounded = bool((np.abs(self.offset) < _LIMIT).all() and (np.abs(self.length) < _LIMIT).all())

    def uses(self) -> dict[str, FileUse]:
        import numpy as np

        if not len(self.file):
            return {}
        lows = np.append(0, np.flatnonzero(self.file[1:] != self.file[:-1]) + 1)
        highs = np.append(lows[1:], len(self.file))
        by_mention = np.argsort(self.rank[lows])
        return {
            self.paths[int(self.file[low])]: self._use(low, high)
            for low, high in zip(lows[by_mention].tolist(), highs[by_mention].tolist(), strict=True)
        }

    def _use(self, low: int, high: int) -> FileUse:
        rows = slice(low, high)
        return FileUse(
            self.keys[int(self.key[low])],
            high - low,
            int((self.offset[rows] + self.length[rows]).max()),
            lambda: self._placed(rows),
            lambda size: self._fits(rows, size),
        )

    def _placed(self, rows: slice) -> list[Placed]:
        path = self.paths[int(self.file[rows.start])]
        return [
            (Record(path, offset, length), self.keys[key])
            for key, offset, length in zip(
                self.key[rows].tolist(), self.offset[rows].tolist(), self.length[rows].tolist(), strict=True
            )
        ]

    def _fits(self, rows: slice, size: int) -> bool:
        import numpy as np

        order = np.argsort(self.offset[rows])
        begins = self.offset[rows][order]
        lengths = self.length[rows]
        ends = begins + lengths[order]
        return bool(
            (lengths > 0).all()
            and begins[0] >= 0
            and int(ends.max()) <= size
            and (ends[:-1] <= begins[1:]).all()
        )
