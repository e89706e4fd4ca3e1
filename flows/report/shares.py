"""Who wrote how much: bytes by rank and by file, and how uneven that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcp.columns import RecordColumns
from dcp.index import CheckpointIndex, ObjectEntry, TensorEntry
from dcp.inspection import FileInfo, writer_rank

FILES = 200
"""Files that are listed; the largest ones."""
_EVEN = 1.25
"""Up to this ratio of the heaviest rank to the mean, ranks count as even."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank wrote: ``bytes`` of tensors and objects in storage, in ``records`` of ``files``."""

    rank: int
    bytes: int
    records: int
    files: int


@dataclass(frozen=True, slots=True)
class FileShare:
    """One object of the checkpoint. ``rank`` is None where its name does not tell who wrote it."""

    name: str
    bytes: int
    records: int
    rank: int | None


@dataclass(frozen=True, slots=True)
class Shares:
    """All ranks in order, and the largest files."""

    ranks: tuple[RankShare, ...]
    files: tuple[FileShare, ...]
    more_files: int
    """Files that are not listed."""

    @property
    def mean(self) -> float:
        """Bytes that a rank wrote on average."""
        return sum(each.bytes for each in self.ranks) / len(self.ranks) if self.ranks else 0.0

    @property
    def imbalance(self) -> float:
        """Bytes of the heaviest rank for each byte of the mean; 1.0 is even."""
        return max((each.bytes for each in self.ranks), default=0) / self.mean if self.mean else 1.0

    @property
    def even(self) -> bool:
        return self.imbalance <= _EVEN

    @property
    def heaviest(self) -> RankShare | None:
        """The rank that wrote most."""
        return max(self.ranks, key=lambda each: each.bytes, default=None)


def shares_of(
    index: CheckpointIndex | None, files: Sequence[FileInfo], absent: Sequence[FileInfo] = ()
) -> Shares:
    """Shares by the index where there is one; records that several keys share count once a key.

    Args:
        index: what the checkpoint says of itself.
        files: its objects.
        absent: those that only the index names; they were written, so they count for their ranks.
    """
    stored = _stored(index) if index is not None else {}
    ranks: dict[int, tuple[int, int, int]] = {}
    for file in (*files, *absent):
        rank = writer_rank(file.name)
        if rank is None:
            continue
        held = stored.get(file.name, 0) if index is not None else file.bytes
        size, records, count = ranks.get(rank, (0, 0, 0))
        ranks[rank] = (size + held, records + file.records, count + 1)
    largest = sorted(files, key=lambda file: (-file.bytes, file.name))
    return Shares(
        ranks=tuple(RankShare(rank, *ranks[rank]) for rank in sorted(ranks)),
        files=tuple(FileShare(f.name, f.bytes, f.records, writer_rank(f.name)) for f in largest[:FILES]),
        more_files=max(0, len(files) - FILES),
    )


def _stored(index: CheckpointIndex) -> Mapping[str, int]:
    """Bytes of records by object."""
    total: dict[str, int] = {}
    for entry in index.entries.values():
        if isinstance(entry, ObjectEntry):
            if entry.record is not None:
                total[entry.record.path] = total.get(entry.record.path, 0) + entry.record.length
        else:
            for path, size in _records(entry):
                total[path] = total.get(path, 0) + size
    return total


def _records(entry: TensorEntry) -> Sequence[tuple[str, int]]:
    records = entry.chunks.records
    if isinstance(records, RecordColumns):
        import numpy as np

        known = records.place >= 0
        sums = np.bincount(records.place[known], weights=records.length[known].astype(np.float64))
        return [(records.places[i][0], int(sums[i])) for i in np.flatnonzero(sums).tolist()]
    return [(record.path, record.length) for record in records if record is not None]
