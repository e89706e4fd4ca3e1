"""What a load would read, for any number of ranks, from the index alone.

For each layout and rank the bytes and requests of two readers are worked out: `BucketReader`, which reads
rows, and torch's own readers, which read every chunk they touch whole. What one rank reads is counted in
`dcp.load.counting`, on columns of numbers, so that a thousand ranks of a hundred thousand chunks take
seconds. Nothing but `.metadata` and a listing is read.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

from dcp.checkpoint import Survey, open_checkpoint
from dcp.errors import NotLoadableError, UsageError
from dcp.findings import Report, errors_of
from dcp.layout import MAX_RANKS, Layout
from dcp.load.batches import bytes_of
from dcp.load.counting import Columns, Count, counts
from dcp.load.preflight import preflight, require_fit
from dcp.tp_rules import TpRules

DEFAULT_RANKS = tuple(1 << power for power in range(MAX_RANKS.bit_length()))
"""1, 2, 4 and so on to the most ranks there may be."""


class ReaderForecast(Report):
    """What one kind of reader would read.

    Attributes:
        bytes: bytes that all ranks together read, heads of records included, the index left out.
        requests: ranges that they read.
        amplification: bytes read for each byte loaded.
        slowest_rank: the rank that reads most bytes, of those the most requests.
        slowest_bytes: bytes that it reads.
        slowest_requests: ranges that it reads.
    """

    bytes: int
    requests: int
    amplification: float
    slowest_rank: int
    slowest_bytes: int
    slowest_requests: int


class LayoutForecast(Report):
    """One layout.

    Attributes:
        layout: text such as ``"fsdp=2,tp=2"``.
        ranks: number of ranks.
        bytes_needed: distinct bytes of tensors and objects that the ranks together need, as a test-load
            reports them.
        bytes_loaded: bytes that all ranks together hold afterwards: what several need, such as objects and
            replicas, counts for each of them.
        bucket_reader: of `dcp.BucketReader` with its default settings. It reads records of up to 64 KiB whole
            and 64 KiB that nobody needs rather than ask twice, so that of small checkpoints it may read more
            bytes than torch's readers, in far fewer requests.
        torch_reader: of torch's readers, a request being the read of one record. Up to 4 KiB of a record
            that they look at again are not counted.
    """

    layout: str
    ranks: int
    bytes_needed: int
    bytes_loaded: int
    bucket_reader: ReaderForecast
    torch_reader: ReaderForecast


class ForecastReport(Report):
    """The whole forecast.

    Attributes:
        checkpoint: its URL.
        tensors: tensors in its index; ``chunks`` and ``objects`` likewise.
        seconds: how long the forecast took.
    """

    checkpoint: str
    tensors: int
    chunks: int
    objects: int
    layouts: list[LayoutForecast]
    seconds: float = 0.0


def forecast(
    url: str | PathLike[str] | Survey,
    *,
    ranks: Iterable[int] = DEFAULT_RANKS,
    layouts: Sequence[str] | None = None,
    tp_rules: TpRules | Mapping[str, object] | str | None = None,
    **options: Any,
) -> ForecastReport:
    """Say what loading a checkpoint would read.

    Where a record is strided or stands in a safetensors file, which the index does not tell, the figures of
    `BucketReader` are an estimate.

    Args:
        url: the checkpoint, or a survey of it, whose index is then read once for all that it is given to.
        ranks: numbers of ranks, each of which is the layout ``fsdp=N``.
        layouts: such as ``"fsdp=2,tp=2"``, instead of ``ranks``.
        tp_rules: what the tp axis of layouts shards, as `dcp.tp_rules.TpRules`, as a mapping or as the place
            of a file; see `dcp.layout` for what it does without.
        options: passed to the fsspec filesystem.

    Raises:
        UsageError: a layout is not possible, or there is none.
        MetadataError: there is no index that can be read.
        NotLoadableError: parts of the checkpoint are missing or cannot be loaded; carries all findings.
        StorageError: storage failed.
    """
    started = time.perf_counter()
    rules = TpRules.given(tp_rules)
    wanted = Layout.parse_all(layouts, rules) if layouts else [Layout(fsdp=n) for n in ranks]
    if not wanted:
        raise UsageError("give at least one number of ranks or layout, e.g. fsdp=2")
    checkpoint = open_checkpoint(url, **options)
    index, findings = preflight(checkpoint)
    wrong = list(errors_of(findings))
    if wrong:
        more = f" and {len(wrong) - 1} more problem{'s' * (len(wrong) > 2)}" if len(wrong) > 1 else ""
        raise NotLoadableError(f"{checkpoint.url} would not load: {wrong[0].message}{more}", findings)
    require_fit(wanted, index.tensors)
    columns = Columns.of(index, rules)
    distinct = bytes_of(index)
    forecasts = [_layout(columns, layout, distinct) for layout in wanted]
    return ForecastReport(
        checkpoint=checkpoint.url,
        tensors=len(index.tensors),
        chunks=sum(len(entry.chunks) for entry in index.tensors),
        objects=len(index.objects),
        layouts=forecasts,
        seconds=round(time.perf_counter() - started, 6),
    )


def _layout(columns: Columns, layout: Layout, distinct: int) -> LayoutForecast:
    reads = counts(columns, layout)
    needed = sum(each.needed for each in reads)
    return LayoutForecast(
        layout=str(layout),
        ranks=layout.ranks,
        bytes_needed=distinct,
        bytes_loaded=needed,
        bucket_reader=_reader([each.bucket_reader for each in reads], needed),
        torch_reader=_reader([each.torch_reader for each in reads], needed),
    )


def _reader(counts: Sequence[Count], needed: int) -> ReaderForecast:
    total = sum(each.bytes for each in counts)
    slowest = max(range(len(counts)), key=lambda rank: (counts[rank].bytes, counts[rank].requests))
    return ReaderForecast(
        bytes=total,
        requests=sum(each.requests for each in counts),
        amplification=round(total / needed, 4) if needed else 1.0,
        slowest_rank=slowest,
        slowest_bytes=counts[slowest].bytes,
        slowest_requests=counts[slowest].requests,
    )
