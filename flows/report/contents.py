"""What of every key travels inside the page: enough for its key browser and its tiling map.

`pack_contents` gives columns of numbers and text, deflated; names from the bucket are made inert and cut to a
bounded length first. The page stays below its size at any number of keys: names are cut shorter, and at last
keys without findings are left out, which the page says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from dcp.checks.scrub import TensorHealth
from dcp.findings import Finding
from dcp.index import Entry, TensorEntry
from dcp.inspection import writer_rank
from flows.report.chunking import EXACT, Patterns, Tilings, columns_of
from flows.report.packing import Packed, pack_json
from flows.report.places import Places, Ranges, pack_places, sizes_of
from flows.report.problems import LONGEST_KEY
from flows.text import name

ABSENT = -1
"""Size of an object that does not exist."""
BUDGET = 1_500_000
"""Characters that the packed keys of a page may take."""
_NAME_LIMITS = (LONGEST_KEY, 240, 80)
"""Longest names, tried in this order until the keys fit."""
_FAULTS = {"tiling.gap": "gap", "tiling.overlap": "overlap", "tiling.out-of-bounds": "outside"}
_MOST_FAULTS = 500
"""Faulty regions of one key that are drawn."""
_ALL_FAULTS = 20_000


@dataclass(frozen=True, slots=True)
class Fault:
    """A region of a tensor that no chunk holds (``gap``), several hold, or that lies ``outside``."""

    kind: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """What a page embeds. ``keys`` is packed JSON; ``left_out`` counts keys that did not fit."""

    keys: str
    tilings: Tilings
    places: Places
    left_out: int

    def document(self) -> dict[str, Any]:
        """What stands in the page's data block."""
        return {
            "keys": self.keys,
            "patterns": [[p.pool, p.start, p.rows, int(p.coarse)] for p in self.tilings.patterns],
            "pools": [_embedded(pool) for pool in self.tilings.pools],
            "places": [_embedded(pool) for pool in self.places.pools],
        }


def pack_contents(
    entries: Mapping[str, Entry],
    files: Mapping[str, int],
    findings: Iterable[Finding],
    health: Mapping[str, TensorHealth] | None,
) -> Contents:
    """Pack all keys.

    Args:
        entries: by key.
        files: bytes of the objects of the checkpoint, by name; `ABSENT` for those that only the index names.
        findings: those about a key mark it; those about tilings are drawn.
        health: what the tensors hold, where they were read.
    """
    numbers = {file: number for number, file in enumerate(files)}
    patterns = Patterns()
    keys = [_Key.of(key, entry, numbers, patterns) for key, entry in entries.items()]
    tilings = patterns.packed()
    places = pack_places([each.ranges if each.singly(tilings) else None for each in keys])
    marks, faults = _marks(findings)
    sizes = sizes_of(files.values())
    marks |= {each.key: "error" for each in keys if each.ranges.beyond(sizes)}
    kept = sorted(range(len(keys)), key=lambda i: keys[i].key not in marks)
    limits = list(_NAME_LIMITS)
    while True:
        chosen = [keys[i] for i in sorted(kept)]
        columns = _columns(chosen, files, marks, faults, health, limits[0])
        columns["place"] = [places.starts[i] for i in sorted(kept)]
        packed = pack_json(columns)
        if len(packed) <= BUDGET or len(kept) <= 1:
            return Contents(packed, tilings, places, len(keys) - len(kept))
        if len(limits) > 1:
            limits.pop(0)
        else:
            kept = kept[: len(kept) // 2]


@dataclass(frozen=True, slots=True)
class _Key:
    key: str
    shape: tuple[int, ...] | None
    dtype: str
    bytes: int
    chunks: int
    pattern: int
    """Number of the way it is cut; of an object, the number of its file."""
    ranges: Ranges
    """Where its chunks stand, in the order in which they are cut; of an object, its one record."""

    def singly(self, tilings: Tilings) -> bool:
        """Whether the page shows each of its chunks, and not only counts of them."""
        return self.shape is None or (self.pattern >= 0 and not tilings.patterns[self.pattern].coarse)

    @classmethod
    def of(cls, key: str, entry: Entry, files: Mapping[str, int], patterns: Patterns) -> _Key:
        if isinstance(entry, TensorEntry):
            columns = columns_of(entry, files)
            ranges = Ranges(columns.file, columns.begin, columns.stored)
            number = patterns.number(columns)
            return cls(key, entry.shape, entry.dtype, entry.nbytes, len(entry.chunks), number, ranges)
        record = entry.record
        file = files.get(record.path, -1) if record else -1
        length = record.length if record else 0
        return cls(key, None, "object", length, 1, file, Ranges.one(file, record))


def _embedded(pool: Packed) -> list[Any]:
    return [pool.columns, pool.rows, int(pool.wide), pool.data]


def _columns(
    keys: Sequence[_Key],
    files: Mapping[str, int],
    marks: Mapping[str, str],
    faults: Mapping[str, Sequence[Fault]],
    health: Mapping[str, TensorHealth] | None,
    limit: int,
) -> dict[str, Any]:
    shapes = list(dict.fromkeys(each.shape for each in keys))
    dtypes = list(dict.fromkeys(each.dtype for each in keys))
    shape_of = {shape: i for i, shape in enumerate(shapes)}
    dtype_of = {dtype: i for i, dtype in enumerate(dtypes)}
    found = {
        "files": [name(file, limit) for file in files],
        "sizes": [min(size, EXACT) for size in files.values()],
        "ranks": [-1 if (rank := writer_rank(file)) is None else rank for file in files],
        "names": [name(each.key, limit) for each in keys],
        "shapes": shapes,
        "shape": [shape_of[each.shape] for each in keys],
        "dtypes": [name(dtype, 40) for dtype in dtypes],
        "dtype": [dtype_of[each.dtype] for each in keys],
        "bytes": [min(each.bytes, EXACT) for each in keys],
        "chunks": [each.chunks for each in keys],
        "pattern": [each.pattern for each in keys],
        "marks": {i: marks[each.key] for i, each in enumerate(keys) if each.key in marks},
        "faults": {
            i: [[fault.kind, *fault.offsets, *fault.sizes] for fault in faults[each.key]]
            for i, each in enumerate(keys)
            if each.key in faults
        },
    }
    if health is not None:
        known = [health.get(each.key) for each in keys]
        found["norm"] = [_short(each.norm) if each else None for each in known]
        found["bad"] = [(each.nan or 0) + (each.inf or 0) if each else 0 for each in known]
    return found


def _short(value: float | None) -> float | None:
    return None if value is None or not isfinite(value) else float(f"{value:.6g}")


def _marks(findings: Iterable[Finding]) -> tuple[dict[str, str], dict[str, list[Fault]]]:
    """The worst severity of each key that is no mere note, and its faulty regions."""
    marks: dict[str, str] = {}
    faults: dict[str, list[Fault]] = {}
    drawn = 0
    for found in findings:
        if found.key is None or found.severity == "info":
            continue
        if marks.get(found.key) != "error":
            marks[found.key] = found.severity
        kind = _FAULTS.get(found.code)
        offsets, sizes = found.detail.get("offsets"), found.detail.get("sizes")
        if kind is None or not isinstance(offsets, list) or not isinstance(sizes, list):
            continue
        known = faults.setdefault(found.key, [])
        if len(known) < _MOST_FAULTS and drawn < _ALL_FAULTS and len(offsets) == len(sizes):
            known.append(Fault(kind, tuple(offsets), tuple(sizes)))
            drawn += 1
    return marks, faults
