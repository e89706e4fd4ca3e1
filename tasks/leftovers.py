"""Files below the publish root that were written for bytes of a step which were then saved over.

An export writes to where it will be published. If the step is saved over before that, nothing ever publishes
those files, and since no manifest names them no consumer sees them: they only take space. `sweep_superseded`
removes them once other bytes of the step are processed, and records it as ``swept``.
"""

from __future__ import annotations

from dcp.errors import NotFoundError
from tasks.leases import Leases
from tasks.ledger import Ledger, StepKey
from tasks.manifest import MANIFEST, published_directory

_BEGUN = "validated"
"""The record after which an export may have written something."""


def sweep_superseded(ledger: Ledger, current: StepKey, leases: Leases) -> list[StepKey]:
    """Remove the unpublished files of earlier bytes of a step; whose they were.

    Only the holder of the step's lease may call it. What was ever published stays, also without its manifest.

    Args:
        ledger: of the run.
        current: the bytes that the step has now.
        leases: of the run. Those of exports elsewhere have the step's name and more.

    Raises:
        StorageError: storage failed.
    """
    keys = ledger.keys(current.step)
    kept = {key.short for key, stages in keys.items() if key == current or "published" in stages}
    candidates = [key for key, stages in keys.items() if _BEGUN in stages and key.short not in kept]
    # A worker that knows nothing of it may still be exporting.
    if not candidates or any(name.startswith(f"{current.step}@") for name in leases.all()):
        return []
    try:
        found = {info.name for info in ledger.run_store.child(current.step).objects()}
    except NotFoundError:
        return []
    swept = []
    for key in candidates:
        inside = sorted(name for name in found if name.startswith(f"{key.short}/"))
        if not inside or f"{key.short}/{MANIFEST}" in inside:
            continue
        for name in inside:
            ledger.run_store.remove(f"{current.step}/{name}")
        ledger.run_store.child(published_directory(key)).prune()
        ledger.create(key, "swept", {"files": len(inside)})
        swept.append(key)
    return swept
