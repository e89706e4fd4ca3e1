"""Commands about published steps: is one still what its manifest says?"""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.command import command
from flows.cli.failures import FAULTY, FINE
from flows.cli.output import Output


@command("verify")
def verify(
    out: Output,
    url: Annotated[
        str, typer.Argument(metavar="PUBLISHED_URL", help="A published directory, or its manifest.json.")
    ],
) -> int:
    """Hash a published step again, against its manifest.

    Exit code 1 where a file is missing, changed or not in the manifest, or where there is no manifest.

    \b
    Example:
      ckpt verify gs://bucket/published/run/step_12000/1a2b3c4d
    """
    from flows.cli.published_views import show_verification
    from tasks.verify import verify as verify_published

    with out.progress("verify") as progress:
        report = verify_published(url, progress=progress)
    errors = [] if report.ok else [f"{report.url}: {report.message}"]
    out.report(report, lambda: show_verification(out, report), errors=errors)
    return FINE if report.ok else FAULTY
