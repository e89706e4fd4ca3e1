"""Pickled objects on their way into a load: scanned before anything may run them."""

from __future__ import annotations

from dcp.archive import Archive
from dcp.errors import RecordError
from dcp.findings import Finding, finding
from dcp.index import ObjectEntry
from dcp.pickles.scan import Verdict, judge, scan
from dcp.pickles.tables import WEIGHTS_ONLY


def examine(entry: ObjectEntry, archive: Archive) -> tuple[Finding | None, bool]:
    """Scan an object; nothing is imported or run for it.

    Returns:
        What is to be said of it, or None if all it asks for is known to be harmless; and whether
        ``torch.load(weights_only=True)`` takes every global that it asks for.
    """
    found = scan(archive.pickle)
    judged = judge(found)
    plain = found.error is None and WEIGHTS_ONLY.issuperset(map(str, found.globals))
    if judged.verdict is Verdict.ALLOWED:
        return None, plain
    reaches = judged.verdict is Verdict.REACHES_CODE
    names = judged.reaching if reaches else judged.unknown
    what = "reaches code" if reaches else "asks for unknown classes" if names else "cannot be read"
    report = finding(
        "records.unsafe",
        f"{entry.key}: its pickle {what}: {', '.join(names) or judged.error}; it was not loaded",
        severity="error" if reaches or not names else "warning",
        key=entry.key,
        file=None if entry.record is None else entry.record.path,
        globals=list(names),
    )
    return report, plain


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
