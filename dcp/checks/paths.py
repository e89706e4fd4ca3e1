"""Do the flattened keys and the paths they were flattened from say the same?

A path whose key is gone is a loss: loading would miss it. For the rest there are only warnings: torch loads
by key and reads the paths just to nest an export, and planners of other make may flatten in their own way.
"""

from __future__ import annotations

from collections.abc import Iterator

from dcp.findings import Finding, finding
from dcp.index import METADATA, CheckpointIndex


def check_paths(index: CheckpointIndex) -> Iterator[Finding]:
    """Findings about keys without a path, paths without a key, and paths that spell another key."""
    if index.unknown_fields:
        yield finding(
            "records.unchecked",
            f"the index has fields of no version known here: {', '.join(index.unknown_fields[:5])}",
            file=METADATA,
            fields=list(index.unknown_fields),
        )
    if index.paths is None:
        return
    for key in index.entries:
        path = index.paths.get(key)
        if path is None:
            yield finding(
                "metadata.unreadable",
                f"{key} has no place in the nested state dict (planner_data)",
                key=key,
                file=METADATA,
                severity="warning",
            )
        elif ".".join(map(str, path)) != key:
            yield finding(
                "metadata.unreadable",
                f"{key} is recorded at the path {list(path)}, which spells another key",
                key=key,
                file=METADATA,
                severity="warning",
                expected=key,
                actual=list(path),
            )
    for key in index.paths:
        if key not in index.entries:
            yield finding(
                "keys.missing",
                f"{key} was saved (planner_data has its place), but the index does not describe it",
                key=key,
                file=METADATA,
            )
