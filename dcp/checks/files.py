"""Is every byte that the index refers to there, inside the checkpoint, and older than the index?

Judged from the index and a listing; data files are opened only to tell whether one whose records overlap
is a single safetensors file, in which the index's offsets do not locate anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice

from dcp.checkpoint import Checkpoint, is_data_file
from dcp.checks.uses import FileUse, Placed, uses
from dcp.columns import RecordColumns
from dcp.findings import Finding, finding
from dcp.index import METADATA, Chunk, Chunks, ObjectEntry
from dcp.record import Record
from dcp.safetensors_file import is_safetensors
from dcp.storage import is_safe_name

_HEADERS = 16
"""Places of a file that are looked at for a safetensors file; writers make one."""
NEWER_SECONDS = 300.0
"""How much newer than the index a data file may be before the step counts as torn."""


def check_files(checkpoint: Checkpoint, *, newer_seconds: float, copied: bool) -> Iterator[Finding]:
    """Findings about referenced objects and the byte ranges in them.

    Args:
        checkpoint: what was opened.
        newer_seconds: how much newer than the index a data file may be before the step counts as torn.
        copied: the checkpoint is a copy, whose times mean nothing: newer files are only a warning.
    """
    by_file = uses(checkpoint.index)
    yield from _missing_records(checkpoint)
    for key in checkpoint.index.unreferenced:
        yield finding(
            "records.mismatch",
            f"bytes are recorded for {key} that belong to none of its chunks"
            if key in checkpoint.index.entries
            else f"bytes are recorded for {key}, which the index does not describe",
            key=key,
            file=METADATA,
        )
    for path, use in by_file.items():
        if not is_safe_name(path):
            yield finding(
                "files.unsafe-path",
                f"the index refers to {path!r}, which is not inside the checkpoint",
                key=use.first_key,
                file=path,
                keys=use.records,
            )
        elif path not in checkpoint.objects:
            yield finding(
                "files.missing",
                f"{path} does not exist; {use.records} records of the index stand in it",
                key=use.first_key,
                file=path,
                keys=use.records,
                expected=use.end,
            )
        elif not use.fits(checkpoint.objects[path].size):
            yield from _ranges(checkpoint, path, use.placed())
    yield from _newer(checkpoint, by_file, newer_seconds, copied)
    for name, info in checkpoint.objects.items():
        if is_data_file(name) and info.size and name not in by_file:
            yield finding(
                "files.orphan", f"{name} ({info.size} bytes) is not referred to", file=name, actual=info.size
            )


def _missing_records(checkpoint: Checkpoint) -> Iterator[Finding]:
    for entry in checkpoint.index.entries.values():
        if isinstance(entry, ObjectEntry):
            if entry.record is None:
                yield finding("records.missing", f"no bytes are recorded for {entry.key}", key=entry.key)
            continue
        for chunk in _chunks_without(entry.chunks):
            if chunk.record is None and chunk.box.volume:
                yield finding(
                    "records.missing",
                    f"no bytes are recorded for {entry.key} {chunk.box}",
                    key=entry.key,
                    offsets=list(chunk.box.offsets),
                    sizes=list(chunk.box.sizes),
                )


def _chunks_without(chunks: Chunks) -> Iterable[Chunk]:
    """Chunks that may lack a record, in order."""
    if not isinstance(chunks.records, RecordColumns):
        return chunks
    return (chunks[i] for i in (chunks.records.place < 0).nonzero()[0].tolist())


def _ranges(checkpoint: Checkpoint, path: str, placed: list[Placed]) -> Iterator[Finding]:
    size = checkpoint.objects[path].size
    sound: list[Placed] = []
    for record, key in placed:
        if record.offset < 0 or record.length < _least(checkpoint, key):
            yield _out_of_bounds(record, key, size)
        elif record.length:
            sound.append((record, key))
    sound.sort(key=lambda item: (item[0].offset, item[0].end))
    yield from _beyond_end(path, sound, size)
    yield from _overlaps(checkpoint, path, sound)


def _least(checkpoint: Checkpoint, key: str) -> int:
    """Fewest bytes of a record; an empty tensor has none in a safetensors file.

    Of one that is not empty a check of its tiling says that its record is too short.
    """
    return 1 if isinstance(checkpoint.index.entries[key], ObjectEntry) else 0


def _out_of_bounds(record: Record, key: str, size: int) -> Finding:
    return finding(
        "records.out-of-bounds",
        f"{key}: bytes {record.offset} to {record.end} lie outside {record.path} ({size} bytes)",
        key=key,
        file=record.path,
        offset=record.offset,
        length=record.length,
        actual=size,
    )


def _beyond_end(path: str, placed: list[Placed], size: int) -> Iterator[Finding]:
    """Records past the end: the tail of a cut file, or ranges that never were in it.

    Writers put records back to back. Those that continue the file without a hole were cut off; one that
    begins beyond a hole was recorded wrongly.
    """
    cut: list[Placed] = []
    reach = size
    for record, key in placed:
        if record.end <= size:
            continue
        if record.offset <= reach:
            reach = max(reach, record.end)
            cut.append((record, key))
        else:
            yield _out_of_bounds(record, key, size)
    if cut:
        record, key = cut[0]
        yield finding(
            "files.truncated",
            f"{path} is {size} bytes, but {reach} are needed: "
            + (f"the record of {key} is" if len(cut) == 1 else f"{len(cut)} records are")
            + " cut off"
            + (f", first {key}" if len(cut) > 1 else ""),
            key=key,
            file=path,
            expected=reach,
            actual=size,
            offset=record.offset,
            length=record.length,
            keys=sorted({key for _, key in cut})[:100],
        )


def _overlaps(checkpoint: Checkpoint, path: str, placed: list[Placed]) -> Iterator[Finding]:
    clashes: list[tuple[Placed, Placed]] = []
    furthest: Placed | None = None
    for item in placed:
        if furthest is not None and item[0].offset < furthest[0].end:
            clashes.append((furthest, item))
        if furthest is None or item[0].end > furthest[0].end:
            furthest = item
    # All tensors of a safetensors file are recorded where it begins, which may be behind objects.
    shared = {second.offset for (first, _), (second, _) in clashes if first.offset == second.offset}
    info = checkpoint.objects[path]
    headers = {
        offset
        for offset in islice(sorted(shared), _HEADERS)
        if is_safetensors(checkpoint.store, info, offset)
    }
    for (first, key), (second, other) in clashes:
        if first.offset == second.offset and second.offset in headers:
            continue
        yield finding(
            "records.overlap",
            f"{key} and {other} claim the same bytes of {path}, from {second.offset}",
            key=other,
            file=path,
            offset=second.offset,
            length=min(first.end, second.end) - second.offset,
            other=key,
        )


def _newer(
    checkpoint: Checkpoint, by_file: Mapping[str, FileUse], newer_seconds: float, copied: bool
) -> Iterator[Finding]:
    times = [checkpoint.objects[name].modified for name in checkpoint.index_files]
    known = [time for time in times if time is not None]
    if not known:
        yield finding(
            "records.unchecked",
            "the store tells no modification times, so whether data was overwritten later cannot be seen",
        )
        return
    written = max(known)
    for name in by_file:
        info = checkpoint.objects.get(name)
        if info is None or info.modified is None or info.modified - written <= newer_seconds:
            continue
        late = info.modified - written
        yield finding(
            "files.newer-than-metadata",
            f"{name} was written {_duration(late)} after {checkpoint.index_files[0]}"
            + (
                ""
                if copied
                else ": it was overwritten since, or this is a copy, which --copied and copied=True tell"
            ),
            key=by_file[name].first_key,
            file=name,
            severity="warning" if copied else "error",
            actual=datetime.fromtimestamp(info.modified, UTC).isoformat(),
            expected=datetime.fromtimestamp(written, UTC).isoformat(),
            seconds=late,
        )


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
