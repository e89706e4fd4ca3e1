"""Two checkpoints compared: keys, shapes, types, chunking, and on demand every element.

Chunk layouts may differ: values are compared band by band in C order, each side read once, in bounded
memory. `diff` gives a `DiffReport`; ``same`` means that loading either gives the same state, whatever the
chunking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from dcp.archive import Archive
from dcp.boxes import Box, check_tiling
from dcp.checkpoint import Checkpoint, open_checkpoint
from dcp.checks.subclasses import subclass_archive
from dcp.checks.values import MEASURED
from dcp.errors import CheckpointError
from dcp.exporting.bands import Band, bands
from dcp.exporting.pump import Pump
from dcp.findings import Finding, Report, has_errors
from dcp.index import CheckpointIndex, Entry, ObjectEntry, TensorEntry
from dcp.records import Records

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

BAND = 4 << 20
"""Bytes of a tensor compared at once."""


class KeyChange(Report):
    """One key that both have and that differs. Shapes in elements."""

    key: str
    kind: tuple[Literal["tensor", "bytes"], Literal["tensor", "bytes"]] | None = None
    shape: tuple[list[int], list[int]] | None = None
    dtype: tuple[str, str] | None = None


class ValueChange(Report):
    """One key whose content differs. Counts in elements; figures only for types that numbers stand in."""

    key: str
    elements: int | None = None
    different: int | None = None
    largest: float | None = None
    """Largest absolute difference of two elements; infinite where one of them is not finite."""
    norm: tuple[float, float] | None = None


class DiffReport(Report):
    """What differs between ``a`` and ``b``."""

    a: str
    b: str
    same: bool
    only_a: list[str]
    only_b: list[str]
    changed: list[KeyChange]
    chunking: list[str]
    """Keys chunked differently, which changes nothing for a load."""
    values: list[ValueChange] | None
    """Keys of different content; None if content was not compared."""
    compared: int
    """Keys whose content was compared."""
    findings: list[Finding]
    """What could not be read, on either side."""


def diff(
    a: str, b: str, *, values: bool = False, progress: Progress | None = None, **options: Any
) -> DiffReport:
    """Compare two checkpoints.

    Args:
        a, b: the checkpoints, in any storage.
        values: compare every element and object too.
        progress: called with bytes done and bytes in all while values are compared.
        options: passed to the filesystems.

    Raises:
        UsageError, MetadataError, NotLoadableError, StorageError: as `dcp.checkpoint.open_checkpoint`.
    """
    left, right = open_checkpoint(a, **options), open_checkpoint(b, **options)
    only_a = [key for key in left.index.entries if key not in right.index.entries]
    only_b = [key for key in right.index.entries if key not in left.index.entries]
    changed = list(_changed(left.index, right.index))
    unlike = {change.key for change in changed}
    contents = _Contents(left, right, progress)
    if values:
        contents.compare(
            [key for key in left.index.entries if key in right.index.entries and key not in unlike]
        )
    return DiffReport(
        a=left.url,
        b=right.url,
        same=not (only_a or only_b or changed or contents.changes or has_errors(contents.findings)),
        only_a=only_a,
        only_b=only_b,
        changed=changed,
        chunking=[key for key in left.index.entries if _rechunked(left.index, right.index, key)],
        values=contents.changes if values else None,
        compared=contents.compared,
        findings=contents.findings,
    )


def _changed(a: CheckpointIndex, b: CheckpointIndex) -> Iterator[KeyChange]:
    for key, left in a.entries.items():
        right = b.entries.get(key)
        if right is None:
            continue
        if isinstance(left, TensorEntry) and isinstance(right, TensorEntry):
            shape = (list(left.shape), list(right.shape)) if left.shape != right.shape else None
            dtype = (left.dtype, right.dtype) if left.dtype != right.dtype else None
            if shape or dtype:
                yield KeyChange(key=key, shape=shape, dtype=dtype)
        elif type(left) is not type(right):
            yield KeyChange(key=key, kind=(_kind(left), _kind(right)))


def _kind(entry: Entry) -> Literal["tensor", "bytes"]:
    return "tensor" if isinstance(entry, TensorEntry) else "bytes"


def _rechunked(a: CheckpointIndex, b: CheckpointIndex, key: str) -> bool:
    left, right = a.entries[key], b.entries.get(key)
    if not isinstance(left, TensorEntry) or not isinstance(right, TensorEntry) or left.shape != right.shape:
        return False
    return sorted(left.chunks.boxes, key=lambda box: box.offsets) != sorted(
        right.chunks.boxes, key=lambda box: box.offsets
    )


class _Contents:
    """Compares the content of keys that both sides describe alike."""

    def __init__(self, a: Checkpoint, b: Checkpoint, progress: Progress | None) -> None:
        self.sides = (a, b)
        self.records = tuple(Records(side.store, side.objects) for side in self.sides)
        self.progress = progress
        self.changes: list[ValueChange] = []
        self.findings: list[Finding] = []
        self.compared = 0

    def compare(self, keys: list[str]) -> None:
        entries = [tuple(side.index.entries[key] for side in self.sides) for key in keys]
        pairs = [(a, b) for a, b in entries if isinstance(a, TensorEntry) and isinstance(b, TensorEntry)]
        self._tensors([pair for pair in pairs if self._tiled(*pair)])
        for a, b in entries:
            if isinstance(a, ObjectEntry) and isinstance(b, ObjectEntry):
                self._object(a, b)

    def _tiled(self, *pair: TensorEntry) -> bool:
        """Whether both sides' chunks cover the tensor; what does not is reported as validation does."""
        from dcp.checks.tiling import check_tensor

        for entry in pair:
            if not check_tiling(entry.shape, entry.chunks.boxes, limit=1).ok:
                self.findings += check_tensor(entry)
                return False
        return True

    def _tensors(self, pairs: list[tuple[TensorEntry, TensorEntry]]) -> None:
        total = sum(a.nbytes for a, _ in pairs)
        done = 0
        threads = 2
        pumps = [Pump(records, band_bytes=BAND, threads=threads) for records in self.records]
        streams = [pump.run(_jobs(pairs, side)) for side, pump in enumerate(pumps)]
        for a, b in pairs:
            tally = _Tally(a)
            left = a.nbytes
            while left:
                first, second = next(streams[0]), next(streams[1])
                tally.faults += (*first.faults, *second.faults)
                if not tally.faults:
                    tally.add(first.view, second.view, same=first.crc32 == second.crc32)
                left -= first.band.nbytes
                done += first.band.nbytes
                if self.progress is not None:
                    self.progress(done, total)
            if tally.faults:
                self._unread(a, b, tally.faults)
                continue
            self.compared += 1
            if tally.different:
                self.changes.append(tally.change())

    def _unread(self, a: TensorEntry, b: TensorEntry, faults: list[CheckpointError]) -> None:
        """Compare records as they are if no plain tensors stand in them; else tell why they are unread."""
        left, right = self._archives(0, a), self._archives(1, b)
        if not left or left.keys() != right.keys():
            for fault in faults:
                self._report(fault)
            return
        self.compared += 1
        if not all(_alike(left[box], right[box]) for box in left):
            self.changes.append(ValueChange(key=a.key))

    def _archives(self, side: int, entry: TensorEntry) -> dict[Box, Archive]:
        """The records of a tensor of a class of its own, whole ones alone."""
        found = {
            chunk.box: subclass_archive(self.records[side], entry.key, chunk.record) for chunk in entry.chunks
        }
        return {box: archive for box, archive in found.items() if archive is not None}

    def _report(self, fault: CheckpointError) -> None:
        found = fault.as_finding()
        if found not in self.findings:
            self.findings.append(found)

    def _object(self, a: ObjectEntry, b: ObjectEntry) -> None:
        try:
            left, right = (
                records.read_object(entry) for records, entry in zip(self.records, (a, b), strict=True)
            )
        except CheckpointError as error:
            self._report(error)
            return
        self.compared += 1
        if not _alike(left, right):
            self.changes.append(ValueChange(key=a.key))


def _alike(a: Archive, b: Archive) -> bool:
    """Whether two values were saved from the same pickle and storages."""
    names = {name for name in (*a.entries, *b.entries) if name == "data.pkl" or name.startswith("data/")}
    return all(
        name in a.entries and name in b.entries and a.content(name) == b.content(name) for name in names
    )


def _jobs(pairs: list[tuple[TensorEntry, TensorEntry]], side: int) -> Iterator[tuple[TensorEntry, Band]]:
    for pair in pairs:
        for band in bands(pair[side], BAND):
            yield pair[side], band


class _Tally:
    """Differences of one tensor, summed band by band."""

    def __init__(self, entry: TensorEntry) -> None:
        self.entry = entry
        self.faults: list[CheckpointError] = []
        self.elements = 0
        self.different = 0
        self.largest = 0.0
        self.squares = [0.0, 0.0]

    def add(self, a: memoryview, b: memoryview, *, same: bool) -> None:
        """Compare two bands; ``same`` says that their CRCs agree, which still has to be made certain."""
        import numpy as np

        from dcp.checks.values import as_numbers, measure
        from dcp.dtypes import ITEMSIZE

        item = ITEMSIZE[self.entry.dtype]
        self.elements += len(a) // item
        equal = same and a == b
        if self.entry.dtype in MEASURED:
            for side, view in enumerate((a, b)):
                self.squares[side] += measure(view, self.entry.dtype).squares
        if equal:
            return
        left, right = (np.frombuffer(view, np.uint8).reshape(-1, item) for view in (a, b))
        self.different += int(np.count_nonzero((left != right).any(axis=1)))
        if self.entry.dtype in MEASURED:
            with np.errstate(invalid="ignore", over="ignore"):
                x, y = (as_numbers(view, self.entry.dtype).astype(np.float64) for view in (a, b))
                distance = np.abs(x - y)
            both_nan = np.isnan(x) & np.isnan(y)
            distance[np.isnan(distance)] = np.inf
            distance[both_nan | (x == y)] = 0.0
            self.largest = max(self.largest, float(distance.max(initial=0.0)))

    def change(self) -> ValueChange:
        measured = self.entry.dtype in MEASURED
        return ValueChange(
            key=self.entry.key,
            elements=self.elements,
            different=self.different,
            largest=self.largest if measured else None,
            norm=(self.squares[0] ** 0.5, self.squares[1] ** 0.5) if measured else None,
        )
