"""What can be said of a load before it begins: which tensors can be loaded, and which bytes are missing.

No torch: what this torch does not know, `dcp.load.metadata.known_to_torch` leaves out.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from dcp.checkpoint import Checkpoint
from dcp.checks.files import NEWER_SECONDS, check_files
from dcp.checks.sound import is_sound
from dcp.checks.subclasses import looks_like_subclass, unchecked
from dcp.checks.tiling import check_tensor
from dcp.errors import NotLoadableError
from dcp.findings import Code, Finding, finding
from dcp.index import CheckpointIndex, Entry, ObjectEntry, TensorEntry
from dcp.layout import Layout
from dcp.records import Records

_ABSENT: frozenset[Code] = frozenset(
    ["files.missing", "files.truncated", "files.unsafe-path", "records.missing", "records.out-of-bounds"]
)
"""What keeps bytes from being loaded. Whatever else may be wrong with the files is for a validation."""

_SHOWN = 5


def require_whole(checkpoint: Checkpoint, *, copied: bool) -> None:
    """Refuse a torn checkpoint, judged from its index and its listing.

    Args:
        checkpoint: what was opened.
        copied: times mean nothing, because it is a copy.

    Raises:
        NotLoadableError: files are missing, cut off, or were written long after the index.
    """
    torn = list(_torn(checkpoint, copied))
    if torn:
        raise NotLoadableError(_refusal(checkpoint.url, torn), torn)


def _torn(checkpoint: Checkpoint, copied: bool) -> Iterator[Finding]:
    """What keeps a checkpoint from being loaded, as far as its index and its listing tell."""
    for found in check_files(checkpoint, newer_seconds=NEWER_SECONDS, copied=copied):
        if found.code in _ABSENT or (found.code == "files.newer-than-metadata" and not copied):
            yield found


def _refusal(url: str, torn: Sequence[Finding]) -> str:
    reasons = "; ".join(found.message for found in torn[:_SHOWN])
    more = f"; and {len(torn) - _SHOWN} more" if len(torn) > _SHOWN else ""
    copy = any(found.code == "files.newer-than-metadata" for found in torn)
    advice = (
        ", or load with copied=True if it is a copy" if copy else f", or see ckpt validate {shlex.quote(url)}"
    )
    return f"{url} is torn and was not loaded: {reasons}{more}. Take an earlier step{advice}"


def preflight(checkpoint: Checkpoint, *, copied: bool = False) -> tuple[CheckpointIndex, list[Finding]]:
    """The index without the tensors that cannot be loaded at all, and findings.

    Each tensor left out is a finding, and so is everything for which `require_whole` would refuse it. One
    that only its own class could put together is left out with a warning: it is not damaged.
    """
    findings = list(_torn(checkpoint, copied))
    records = Records(checkpoint.store, checkpoint.objects)
    kept: dict[str, Entry] = {}
    for entry in checkpoint.index.entries.values():
        problems = _problems(records, entry)
        findings += problems
        if not problems:
            kept[entry.key] = entry
    return replace(checkpoint.index, entries=kept), findings


def require_fit(layouts: Sequence[Layout], entries: Iterable[TensorEntry]) -> None:
    """Refuse layouts that some of the tensors cannot be held in.

    Raises:
        UsageError: a tp rule does not fit a tensor, or shards would be ones that torch cannot express.
    """
    ruled = [layout for layout in layouts if layout.rules is not None]
    for entry in entries if ruled else ():
        for layout in ruled:
            layout.require_fit(entry.shape, entry.key)


def _problems(records: Records, entry: Entry) -> list[Finding]:
    if isinstance(entry, ObjectEntry):
        return [] if is_sound(entry) else [_impossible(entry, "its record is larger than any file")]
    if looks_like_subclass(records, entry):
        return [unchecked(entry)]
    if entry.dtype.startswith("q"):
        message = f"{entry.key} is quantised ({entry.dtype}): a plain tensor of that type cannot be made"
        return [finding("metadata.unsupported", message, key=entry.key)]
    if is_sound(entry):
        return []
    why = f"it takes {entry.nbytes} bytes, which its records cannot be"
    return [*check_tensor(entry)] or [_impossible(entry, why)]


def _impossible(entry: Entry, why: str) -> Finding:
    return finding("records.mismatch", f"{entry.key}: {why}", key=entry.key)
