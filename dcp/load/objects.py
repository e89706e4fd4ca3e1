"""Pickled objects on their way into a load: scanned before anything may run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dcp.archive import Archive
from dcp.checks.scrub import judge_object
from dcp.errors import RecordError
from dcp.findings import Finding
from dcp.index import ObjectEntry
from dcp.pickles.scan import Allowance, Judgement, Verdict, beyond_weights_only, judge, scan

NOTHING = Allowance()
"""No more than the built-in lists."""
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Refused:
    """An object that is not to be unpickled."""

    entry: ObjectEntry
    judgement: Judgement

    @property
    def reason(self) -> str:
        """Why, in words that follow its key."""
        if self.judgement.reaching:
            return f"runs code ({', '.join(self.judgement.reaching)})"
        if self.judgement.error is not None:
            return f"cannot be read to its end ({self.judgement.error})"
        return f"asks for {', '.join(self.judgement.unknown)}"


def examine(entry: ObjectEntry, archive: Archive, allow: Allowance) -> tuple[Finding | None, bool]:
    """Judge an object; nothing is imported or run for it.

    Args:
        entry: the object.
        archive: its record.
        allow: classes that it may ask for beyond the built-in lists.

    Returns:
        What is to be said of it, or None if all it asks for is known to be harmless; and whether it may
        be given to ``torch.load(weights_only=True)``, which takes every global and every opcode in it.
    """
    found = next(judge_object(entry, archive.pickle, allow), None)
    return found, found is None and not beyond_weights_only(scan(archive.pickle))


def refused(entry: ObjectEntry, archive: Archive, allow: Allowance) -> Refused | None:
    """The object, if it asks for more than the built-in lists and ``allow`` hold, or cannot be read."""
    judgement = judge(scan(archive.pickle), allow)
    return None if judgement.verdict is Verdict.ALLOWED else Refused(entry, judgement)


def refusal(found: Sequence[Refused]) -> RecordError:
    """One error, ``records.unsafe``, for all objects that a load must not unpickle."""
    shown = "; ".join(f"{each.entry.key} {each.reason}" for each in found[:_SHOWN])
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    unknown = sorted({name for each in found for name in each.judgement.unknown})
    advice = []
    if unknown:
        advice.append(f"If you know these classes, load with BucketReader(..., allow={unknown!r})")
    if any(each.judgement.verdict is Verdict.REACHES_CODE or each.judgement.error for each in found):
        advice.append(
            "trust_objects=True unpickles whatever is there: for a checkpoint of certain origin alone"
        )
    first = found[0].entry
    return RecordError(
        f"nothing was loaded, since to unpickle an object is to run what it asks for: {shown}{more}. "
        f"{'. '.join(advice)}",
        code="records.unsafe",
        key=first.key,
        file=None if first.record is None else first.record.path,
        keys=[each.entry.key for each in found],
        globals=sorted(
            {name for each in found for name in (*each.judgement.reaching, *each.judgement.unknown)}
        ),
    )
