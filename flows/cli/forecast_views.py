"""What a person sees of a forecast: what loads by other numbers of ranks would read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flows.cli.output import ROOM, Output
from flows.text import human_bytes, human_seconds, name

if TYPE_CHECKING:
    from dcp.load.forecast import ForecastReport


def show_forecast(out: Output, report: ForecastReport) -> None:
    """One row a layout. What several ranks load counts for each; the slowest rank reads most bytes."""
    out.facts(
        [
            ("checkpoint", name(report.checkpoint)),
            ("index", f"{report.tensors:,} tensors in {report.chunks:,} chunks, {report.objects:,} objects"),
            ("planned", f"in {human_seconds(report.seconds)}; no data was read"),
        ]
    )
    out.line()
    columns = ["LAYOUT", "LOADED", "READ", "REQUESTS", "×", "SLOWEST RANK", "TORCH READS", "RECORDS", "×"]
    if out.width < ROOM:
        # The last two only say more of what torch's own reader would do.
        columns = columns[:-2]
    out.table(
        columns,
        (
            [
                name(each.layout),
                human_bytes(each.bytes_loaded),
                human_bytes(each.bucket_reader.bytes),
                f"{each.bucket_reader.requests:,}",
                f"{each.bucket_reader.amplification:.2f}",
                f"{each.bucket_reader.slowest_rank}: {human_bytes(each.bucket_reader.slowest_bytes)}",
                human_bytes(each.torch_reader.bytes),
                f"{each.torch_reader.requests:,}",
                f"{each.torch_reader.amplification:.2f}",
            ][: len(columns)]
            for each in report.layouts
        ),
        right=["LOADED", "READ", "REQUESTS", "×", "TORCH READS", "RECORDS"],
    )
