"""Pickled objects on their way into a load: scanned before anything may run them."""

from __future__ import annotations

from dcp.archive import Archive
from dcp.checks.scrub import judge_object
from dcp.errors import RecordError
from dcp.findings import Finding
from dcp.index import ObjectEntry
from dcp.pickles.scan import Allowance, Verdict, globals_of, judge, scan
from dcp.pickles.tables import WEIGHTS_ONLY

NOTHING = Allowance()
"""No more than the built-in lists."""


def examine(entry: ObjectEntry, archive: Archive, allow: Allowance) -> tuple[Finding | None, bool]:
    """Judge an object; nothing is imported or run for it.

    Args:
        entry: the object.
        archive: its record.
        allow: classes that it may ask for beyond the built-in lists.

    Returns:
        What is to be said of it, or None if all it asks for is known to be harmless; and whether it may
        be given to ``torch.load(weights_only=True)``, which takes every global that it asks for.
    """
    found = next(judge_object(entry, archive.pickle, allow), None)
    return found, found is None and WEIGHTS_ONLY.issuperset(globals_of(archive.pickle))


def require_harmless(entry: ObjectEntry, archive: Archive) -> None:
    """Refuse an object that would run code while it is unpickled, or that cannot be read to its end.

    Raises:
        RecordError: ``records.unsafe``.
    """
    found = judge(scan(archive.pickle))
    if found.verdict is Verdict.REACHES_CODE or found.error is not None:
        why = f"it reaches code ({', '.join(found.reaching)})" if found.reaching else str(found.error)
        raise RecordError(
            f"{entry.key}: its pickle was not loaded: {why}. If the checkpoint's origin is certain, "
            "load with trust_objects=True",
            code="records.unsafe",
            key=entry.key,
            file=None if entry.record is None else entry.record.path,
            globals=list(found.reaching),
        )
