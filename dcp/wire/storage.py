"""`storage_data` as columns, grouped by key, and its rows joined to the chunks of a tensor.

`gather` takes the dict as the machine left it, with runs in it. Rows of a key stand together in the order of
the file. Whatever columns cannot hold (an integer beyond 64 bits, more dimensions than a run has, two
entries for one chunk, something that is no entry) makes `gather` give up, so that it is read one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp.boxes import Box, Shape
from dcp.columns import BoxColumns, Place, RecordColumns
from dcp.record import Record
from dcp.wire.columns import MAX_DIMS, Ints, Shapes
from dcp.wire.runs import Run
from dcp.wire.values import WireChunk, WireIndex, WireRecord

_INT64 = 1 << 63


class StorageColumns:
    """Every storage entry; rows ``lows[k] <= i < lows[k + 1]`` belong to key ``keys[k]``."""

    def __init__(
        self,
        names: list[str],
        places: list[Place],
        key: npt.NDArray[np.int32],
        dims: npt.NDArray[np.int8],
        offsets: Ints,
        place: npt.NDArray[np.int32],
        offset: Ints,
        length: Ints,
    ) -> None:
        order = np.argsort(key, kind="stable")
        key = key[order]
        self.dims = dims[order]
        self.offsets = offsets[order]
        self.places = places
        self.place = place[order]
        self.offset = offset[order]
        self.length = length[order]
        begins = np.append(0, np.flatnonzero(key[1:] != key[:-1]) + 1)
        ends = np.append(begins[1:], len(key))
        spans = zip(begins.tolist(), ends.tolist(), strict=True)
        rows = {names[k]: span for k, span in zip(key[begins].tolist(), spans, strict=True)}
        first = order[begins].tolist()
        self._rows = {name: rows[name] for _, name in sorted(zip(first, rows, strict=True))}
        self.doubled = self._has_doubles(key)

    def _has_doubles(self, key: npt.NDArray[np.int32]) -> bool:
        """Whether two rows are of the same chunk: neighbours once sorted, which most keys' rows are."""
        columns = [key, self.dims, *self.offsets.T]
        rising, equal = _rising(columns)
        unsorted = ~rising & ~equal
        if not unsorted.any():
            return bool(equal.any())
        order = np.lexsort(columns[::-1])
        _, equal = _rising([column[order] for column in columns])
        return bool(equal.any())

    def __iter__(self) -> Iterator[str]:
        """Keys in the order of the file."""
        return iter(self._rows)

    def of(self, key: str) -> dict[Shape | None, Record]:
        """The records of a key by the chunk's offsets, None for an object's."""
        low, high = self._rows.get(key, (0, 0))
        records = RecordColumns(
            self.places, self.place[low:high], self.offset[low:high], self.length[low:high]
        )
        return {
            offsets: record
            for offsets, record in zip(self._offsets(low, high), records, strict=True)
            if record is not None
        }

    def _offsets(self, low: int, high: int) -> Iterator[Shape | None]:
        return _tuples(self.dims[low:high], self.offsets[low:high])

    def join(self, key: str, boxes: BoxColumns) -> tuple[RecordColumns, bool]:
        """The record of each box, and whether the key has records that belong to none."""
        low, high = self._rows.get(key, (0, 0))
        rank = boxes.offsets.shape[1]
        if (
            high - low == len(boxes)
            and rank <= self.offsets.shape[1]
            and (self.dims[low:high] == rank).all()
            and np.array_equal(self.offsets[low:high, :rank], boxes.offsets)
        ):
            rows = slice(low, high)
            return (
                RecordColumns(self.places, self.place[rows], self.offset[rows], self.length[rows]),
                False,
            )
        where = dict(zip(self._offsets(low, high), range(low, high), strict=True))
        found = [where.get(tuple(offsets), -1) for offsets in boxes.offsets.tolist()]
        index = np.array(found, np.int64)
        missing = index < 0
        place = np.where(missing, np.int32(-1), self.place[index])
        offset = np.where(missing, 0, self.offset[index])
        length = np.where(missing, 0, self.length[index])
        left_over = len(set(found) - {-1}) < high - low
        return RecordColumns(self.places, place, offset, length), left_over


def _rising(columns: list[Any]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Of each row to the next, in the order of the columns: whether it rises, whether it is equal."""
    rising = np.zeros(max(len(columns[0]) - 1, 0), np.bool_)
    equal = np.ones_like(rising)
    for column in columns:
        rising |= equal & (column[1:] > column[:-1])
        equal &= column[1:] == column[:-1]
    return rising, equal


def _tuples(dims: npt.NDArray[np.int8], values: Ints) -> Iterator[Shape | None]:
    for rank, row in zip(dims.tolist(), values.tolist(), strict=True):
        yield tuple(row[:rank]) if rank >= 0 else None


def _padded(parts: list[Ints]) -> Ints:
    width = max((part.shape[1] for part in parts), default=0)
    joined = np.zeros((sum(map(len, parts)), width), np.int64)
    at = 0
    for part in parts:
        joined[at : at + len(part), : part.shape[1]] = part
        at += len(part)
    return joined


def _shapes(shapes: list[Shape | None]) -> Shapes | None:
    """Shapes as a column, None if one does not fit."""
    dims = np.array([-1 if shape is None else len(shape) for shape in shapes], np.int8)
    width = max(0, int(dims.max(initial=0)))
    if width > MAX_DIMS or not all(_fits(*(shape or ())) for shape in shapes):
        return None
    rows = [[*(shape or ()), *[0] * (width - len(shape or ()))] for shape in shapes]
    return Shapes(dims, np.array(rows, np.int64).reshape(len(shapes), width))


def _fits(*values: int) -> bool:
    return all(-_INT64 <= value < _INT64 for value in values)


def gather(storage: dict[Any, Any], names: list[str]) -> StorageColumns | None:
    """All of ``storage`` as columns, or None if it has to be read one by one.

    Args:
        storage: from `WireIndex` to `WireRecord`, and from `Run` to itself.
        names: the texts that the runs refer to by number.
    """
    names = list(names)
    numbers = {name: number for number, name in enumerate(names)}
    places: list[Place] = [(name, ()) for name in names]
    numbered: dict[Place, int] = {place: number for number, place in enumerate(places)}
    key: list[Any] = []
    shapes: list[Shapes] = []
    place: list[Any] = []
    offset: list[Any] = []
    length: list[Any] = []
    singles: list[tuple[WireIndex, WireRecord]] = []

    def flush() -> bool:
        column = _shapes([index.offset for index, _ in singles])
        if column is None or not all(_fits(r.offset, r.length) for _, r in singles):
            return False
        shapes.append(column)
        for index, _ in singles:
            if str(index.fqn) not in numbers:
                numbers[str(index.fqn)] = len(names)
                names.append(str(index.fqn))
        key.append([numbers[str(index.fqn)] for index, _ in singles])
        where: list[Place] = [(str(r.path), r.transforms) for _, r in singles]
        for spot in where:
            if spot not in numbered:
                numbered[spot] = len(places)
                places.append(spot)
        place.append([numbered[spot] for spot in where])
        offset.append([record.offset for _, record in singles])
        length.append([record.length for _, record in singles])
        singles.clear()
        return True

    for index, record in storage.items():
        if type(index) is Run:
            if singles and not flush():
                return None
            rows, window = slice(index.first, index.last), index.window
            key.append(window.texts["MetadataIndex.fqn"].ids[rows])
            column = window.shapes["MetadataIndex.offset"]
            shapes.append(Shapes(column.dims[rows], column.values[rows]))
            place.append(window.texts["_StorageInfo.relative_path"].ids[rows])
            offset.append(window.ints["_StorageInfo.offset"][rows])
            length.append(window.ints["_StorageInfo.length"][rows])
        elif type(index) is WireIndex and type(record) is WireRecord and None not in (index.fqn, record.path):
            singles.append((index, record))
        else:
            return None
    if singles and not flush():
        return None
    used, where_of = _used(np.concatenate(place, dtype=np.int32, casting="unsafe"))
    columns = StorageColumns(
        names,
        [places[number] for number in used],
        np.concatenate(key, dtype=np.int32, casting="unsafe"),
        np.concatenate([column.dims for column in shapes]),
        _padded([column.values for column in shapes]),
        where_of,
        np.concatenate(offset, dtype=np.int64),
        np.concatenate(length, dtype=np.int64),
    )
    return None if columns.doubled else columns


def _used(numbers: npt.NDArray[np.int32]) -> tuple[list[int], npt.NDArray[np.int32]]:
    """The numbers that occur, and the place of each among them: most texts are keys, few are files."""
    occurs = np.bincount(numbers) > 0
    return occurs.nonzero()[0].tolist(), (np.cumsum(occurs, dtype=np.int32) - 1)[numbers]


def one_by_one(storage: dict[Any, Any], names: list[str]) -> Iterator[tuple[object, object]]:
    """The entries of ``storage`` with those of its runs made."""
    for index, record in storage.items():
        if type(index) is not Run:
            yield index, record
            continue
        rows, window = slice(index.first, index.last), index.window
        column = window.shapes["MetadataIndex.offset"]
        for fqn, shape, path, offset, length in zip(
            window.texts["MetadataIndex.fqn"].ids[rows].tolist(),
            _tuples(column.dims[rows], column.values[rows]),
            window.texts["_StorageInfo.relative_path"].ids[rows].tolist(),
            window.ints["_StorageInfo.offset"][rows].tolist(),
            window.ints["_StorageInfo.length"][rows].tolist(),
            strict=True,
        ):
            place, made = WireIndex(), WireRecord()
            place.fqn, place.offset = names[fqn], shape
            made.path, made.offset, made.length = names[path], offset, length
            yield place, made


def boxes_of(chunks: list[Any]) -> BoxColumns | None:
    """Chunks and runs of chunks as columns; None if their ranks differ or a number does not fit."""
    offsets: list[Ints] = []
    sizes: list[Ints] = []
    for is_run, group in _grouped(chunks):
        if is_run:
            for run in group:
                rows, shapes = slice(run.first, run.last), run.window.shapes
                for name, into in (("offsets", offsets), ("sizes", sizes)):
                    column = shapes[f"ChunkStorageMetadata.{name}"]
                    dims = column.dims[rows]
                    rank = int(dims[0])
                    if (dims != rank).any():
                        return None
                    into.append(column.values[rows, :rank])
        else:
            for values, into in (([c.offsets for c in group], offsets), ([c.sizes for c in group], sizes)):
                shapes_ = _shapes(values)
                if shapes_ is None or (shapes_.dims != shapes_.dims[0]).any():
                    return None
                into.append(shapes_.values)
    if len({part.shape[1] for part in chain(offsets, sizes)}) != 1:
        return None
    return BoxColumns(np.concatenate(offsets), np.concatenate(sizes))


def _grouped(chunks: list[Any]) -> Iterator[tuple[bool, list[Any]]]:
    group: list[Any] = []
    for chunk in chunks:
        if group and (type(chunk) is Run) != (type(group[0]) is Run):
            yield type(group[0]) is Run, group
            group = []
        group.append(chunk)
    if group:
        yield type(group[0]) is Run, group


def boxes_one_by_one(chunks: list[Any]) -> Iterator[object]:
    """Chunks with those of their runs made: a `Box` for each, or whatever else there is."""
    for chunk in chunks:
        if type(chunk) is Run:
            rows, shapes = slice(chunk.first, chunk.last), chunk.window.shapes
            columns = [shapes[f"ChunkStorageMetadata.{name}"] for name in ("offsets", "sizes")]
            for offsets, sizes in zip(*(_tuples(c.dims[rows], c.values[rows]) for c in columns), strict=True):
                assert offsets is not None
                assert sizes is not None
                yield Box(offsets, sizes)
        elif type(chunk) is WireChunk and chunk.offsets is not None:
            yield Box(chunk.offsets, chunk.sizes)
        else:
            yield chunk
