"""Where a report is written, and the names it gets where nobody gives one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dcp.errors import UsageError
from dcp.findings import Report
from dcp.storage import normalise_url, open_parent

PAGE = "report.html"

_PLAIN = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST = 80


class SavedReport(Report):
    """What was written. ``report`` is a local path or URL, ``bytes`` its size; ``ok`` is of the subject."""

    report: str
    subject: str
    kind: str
    """``checkpoint`` or ``runs``."""
    verdict: str
    ok: bool
    errors: int
    warnings: int
    bytes: int
    seconds: float


def default_name(subject: str) -> str:
    """``step_100-report.html`` for a checkpoint or run called ``step_100``."""
    plain = _PLAIN.sub("-", subject).strip("-.")[:_LONGEST]
    return f"{plain}-{PAGE}" if plain else PAGE


def save(page: str, output: str) -> str:
    """Write a page whole, or not at all; where it is.

    Args:
        page: the document.
        output: a local path or URL of the file.

    Raises:
        UsageError: it names a directory.
        StorageError: it cannot be written.
    """
    place = normalise_url(output)
    if "://" not in place and (output.endswith(("/", os.sep)) or Path(place).is_dir()):
        raise UsageError(f"{output} is a directory; name a file in it: -o {Path(output) / PAGE}")
    store, name = open_parent(place)
    store.replace(name, page.encode())
    return place
