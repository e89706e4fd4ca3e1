"""The page beside a published step, written before the manifest that lists it.

It is created only if absent: of two workers that publish the same step one writes it, and both list what then
stands there. A page is never the reason that a good step is not published: what prevents it is logged.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from dcp.checks.scrub import TensorHealth
from dcp.errors import NotFoundError
from dcp.findings import Finding
from dcp.storage import Store
from flows.report.checkpoint import Judged, gather_checkpoint
from flows.report.checkpoint_page import render_checkpoint
from flows.report.saving import PAGE
from flows.text import human_bytes, human_seconds, name, plural
from tasks.ledger import StepKey, create_once
from tasks.manifest import Artifact, PublishedFile

_LIMIT = 64 << 20
"""Largest page read back, in bytes."""

_log = logging.getLogger(__name__)


def publish_page(
    store: Store,
    url: str,
    key: StepKey,
    *,
    wanted: bool = True,
    warnings: Sequence[Finding],
    tensors: Mapping[str, TensorHealth] | None,
    artifacts: Sequence[Artifact],
    timings: Mapping[str, float],
    layouts: Sequence[str],
    options: Mapping[str, Any],
) -> PublishedFile | None:
    """Write the page of a step that is about to be published, and say what stands there; None without one.

    Args:
        store: the published directory.
        url: the step in the source.
        key: its name and fingerprint.
        wanted: whether to write one; one that an earlier attempt left is told all the same.
        warnings: what validation and export found.
        tensors: what the tensors hold, where they were read.
        artifacts: what was exported.
        timings: seconds a stage.
        layouts: as which it was test-loaded.
        options: fsspec options of the source.

    Raises:
        StorageError: it is not known whether a page stands there.
    """
    if not wanted:
        return _standing(store)
    try:
        judged = Judged("committed", True, key.fingerprint, warnings, tensors)
        facts = gather_checkpoint(
            url, judged=judged, published=_history(artifacts, timings, layouts), options=options
        )
        page = render_checkpoint(facts).encode()
        if not create_once(store, PAGE, page):
            page = store.read(PAGE, _LIMIT)
        return _described(page)
    # Whatever it is, a step without a page is worth more than none.
    except Exception as error:
        _log.warning("no page for %s: %s: %s", name(url, 1000), type(error).__name__, error)
    return _standing(store)


def _standing(store: Store) -> PublishedFile | None:
    """The page that an earlier attempt may have left: what stands there must be in the manifest."""
    try:
        return _described(store.read(PAGE, _LIMIT))
    except NotFoundError:
        return None


def _described(page: bytes) -> PublishedFile:
    import google_crc32c

    return PublishedFile(
        name=PAGE,
        size=len(page),
        sha256=hashlib.sha256(page).hexdigest(),
        crc32c=f"{google_crc32c.value(page):08x}",
    )


def _history(
    artifacts: Sequence[Artifact], timings: Mapping[str, float], layouts: Sequence[str]
) -> list[tuple[str, str, str]]:
    loaded = f"as {', '.join(name(layout) for layout in layouts)}" if layouts else ""
    said = [
        (stage.capitalize(), human_seconds(seconds), loaded if stage == "test-load" else "")
        for stage, seconds in timings.items()
    ]
    for artifact in artifacts:
        size = human_bytes(sum(file.size for file in artifact.files))
        tensors = plural(len(artifact.tensors), "tensor")
        memory = f"{tensors}, made in {human_bytes(artifact.peak_memory)} of memory"
        said.append((name(artifact.name), size, memory))
    return said
