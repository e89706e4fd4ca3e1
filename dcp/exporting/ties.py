"""Which tensors are one: tied weights, which DCP saves once under every name.

Only tensors of one type and shape can be equal, and of those only the ones whose first bytes are equal are
read whole. Equal are those with one digest, as they were saved: what only a cast makes equal was two tensors,
such as a weight and an optimizer's master copy. A tensor of one repeated value, such as fresh moments of an
optimizer or the ones of a norm, equals others by chance. Neither is tied: code that changes loaded tensors in
place would change both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import islice

from dcp.checkpoint import Checkpoint
from dcp.dtypes import ITEMSIZE
from dcp.exporting.bands import Band, bands, with_few_pieces
from dcp.exporting.pump import Pump
from dcp.index import TensorEntry
from dcp.records import Records

_SAMPLE = 64 << 10
"""Bytes from a tensor's beginning that are compared first."""


def ties(
    checkpoint: Checkpoint, entries: Iterable[TensorEntry], *, band_bytes: int, threads: int
) -> dict[str, str]:
    """Keys of tensors that repeat an earlier one, each with the key of the first.

    Args:
        checkpoint: where they are.
        entries: the tensors, in the order that decides which is the first.
        band_bytes, threads: as `Pump` takes them.

    Raises:
        CheckpointError: a chunk is damaged.
        StorageError: the store failed.
    """
    candidates = _alike([(entry, (entry.dtype, entry.shape)) for entry in entries if entry.nbytes])
    plain = [entry for entry in candidates if not _decoded_whole(entry)]
    samples = dict.fromkeys((entry.key for entry in candidates), "")
    samples |= _digests(checkpoint, plain, 1, min(_SAMPLE, band_bytes), threads)
    candidates = _alike([(entry, (entry.dtype, entry.shape, samples[entry.key])) for entry in candidates])
    found = _digests(checkpoint, candidates, None, band_bytes, threads)
    first: dict[Hashable, str] = {}
    same: dict[str, str] = {}
    for entry in candidates:
        if entry.key in found:
            kept = first.setdefault((entry.dtype, entry.shape, found[entry.key]), entry.key)
            if kept != entry.key:
                same[entry.key] = kept
    return same


def sampled_bytes(entries: Iterable[TensorEntry]) -> int:
    """Bytes that `ties` reads to see which tensors may be equal."""
    candidates = _alike([(entry, (entry.dtype, entry.shape)) for entry in entries if entry.nbytes])
    return sum(min(entry.nbytes, _SAMPLE) for entry in candidates)


def _alike(marked: Sequence[tuple[TensorEntry, Hashable]]) -> list[TensorEntry]:
    """Those that share their mark with another, in order."""
    counts: dict[Hashable, int] = defaultdict(int)
    for _, mark in marked:
        counts[mark] += 1
    return [entry for entry, mark in marked if counts[mark] > 1]


def _decoded_whole(entry: TensorEntry) -> bool:
    """Whether a look at the beginning would cost a whole chunk, and keep it in memory."""
    return any(chunk.record is not None and chunk.record.transforms for chunk in entry.chunks)


def _digests(
    checkpoint: Checkpoint,
    entries: Sequence[TensorEntry],
    most: int | None,
    band_bytes: int,
    threads: int,
) -> dict[str, str]:
    """Digest of each tensor's first ``most`` bands, or of all; whole tensors of one value are left out."""
    import xxhash

    pump = Pump(Records(checkpoint.store, checkpoint.objects), band_bytes=band_bytes, threads=threads)

    def jobs() -> Iterator[tuple[TensorEntry, Band]]:
        for entry in entries:
            # Samples must be of one length, whatever the chunks.
            size = band_bytes if most else with_few_pieces(entry, band_bytes)
            for band in islice(bands(entry, size), most):
                yield entry, band

    running = {entry.key: xxhash.xxh3_128() for entry in entries}
    element: dict[str, bytes] = {}
    varied: set[str] = set()
    for filled in pump.run(jobs()):
        for fault in filled.faults:
            raise fault
        key, view, item = filled.entry.key, filled.view, ITEMSIZE[filled.entry.dtype]
        running[key].update(view)
        if key not in varied:
            one = element.setdefault(key, bytes(view[:item]))
            if bytes(view) != one * (len(view) // item):
                varied.add(key)
    return {key: digest.hexdigest() for key, digest in running.items() if most is not None or key in varied}
