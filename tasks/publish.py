"""The stage *publish*: one conditional creation that turns files into a published step.

`publish_step` digests the tensors of the finished files and looks once more at the source, since neither
what was damaged on its way nor a step that was saved over meanwhile may be published, and creates the
manifest only if absent. Of two publishers one creates it; the other finds it, compares its own files with
it, and has nothing left to do. Then the ``latest`` alias moves forward.

Both write the same file names, because the same step exported by the same versions and settings gives
the same bytes; where it does not, the one that came second says so (`EnvironmentFault`) instead of keeping
silent. Files of a step that turns out not to be publishable stay where they are, unpublished: a publisher
that deleted them could meet another that is just creating the manifest.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from dcp.checkpoint import survey
from dcp.errors import ChangedError, EnvironmentFault, NotFoundError
from dcp.findings import Finding, Report
from dcp.storage import Store, join_url, open_store
from tasks.aliases import AliasRecord, advance, aliases, current_alias, set_alias
from tasks.ledger import StepKey, create_once, timestamp
from tasks.manifest import (
    MANIFEST,
    Artifact,
    Manifest,
    PublishedFile,
    encode,
    published_directory,
    read_manifest,
    tool_versions,
)
from tasks.outcomes import boundary
from tasks.tensor_check import completed, wrong_tensors
from tasks.text import typed
from tasks.verify import VerifyReport, verify

__all__ = [
    "AliasRecord",
    "PublishReport",
    "VerifyReport",
    "aliases",
    "current_alias",
    "publish_step",
    "require_unchanged",
    "set_alias",
    "verify",
]


class PublishReport(Report):
    """Where a step was published. ``first`` is False if somebody else had published it before."""

    url: str
    manifest: str
    fingerprint: str
    files: int
    bytes: int
    first: bool
    alias: str
    """Manifest that ``latest`` leads to now, relative to the run's directory."""
    findings: list[Finding] = Field(default_factory=list)
    """Of what was published by hand: what is not the step's as it stands there."""


@boundary
def publish_step(
    url: str,
    publish_root: str,
    *,
    run: str,
    number: int,
    key: StepKey,
    listing: str,
    artifacts: Sequence[Artifact],
    documents: Sequence[PublishedFile] = (),
    warnings: Sequence[Finding] = (),
    timings: Mapping[str, float] | None = None,
    options: Mapping[str, Any],
    publish_options: Mapping[str, Any],
) -> PublishReport:
    """Publish what was exported.

    Args:
        url: the step's directory in the source.
        publish_root: as in the settings.
        run: the run's name.
        number: the step's number.
        key: the step's name and the fingerprint of the bytes that were exported.
        listing: the listing identity that goes with the fingerprint.
        artifacts: what `export_step` wrote below `published_directory`.
        documents: files that were written there for people, to be listed too.
        warnings: findings to tell consumers.
        timings: seconds a stage.
        options: fsspec options of the source.
        publish_options: fsspec options of the publish root.

    Raises:
        ChangedError: the source is not what was exported any more; nothing was published.
        EnvironmentFault: storage failed, a file is not there or does not hold what was exported, or another
            publisher wrote other bytes.
    """
    run_store = open_store(publish_root, **publish_options).child(run)
    store = run_store.child(published_directory(key))
    manifest = read_manifest(store)
    first = False
    if manifest is None:
        _require_stored(store, artifacts)
        made = [completed(store, artifact) for artifact in artifacts]
        _require_equal(store, made)
        require_unchanged(url, listing, options)
        manifest = Manifest(
            run=run,
            step=key.step,
            number=number,
            source=url,
            fingerprint=key.fingerprint,
            created=timestamp(time.time()),
            who=f"{socket.gethostname()}:{os.getpid()}",
            files=sorted(
                [*(file for a in artifacts for file in a.files), *documents], key=lambda file: file.name
            ),
            documents=sorted(file.name for file in documents),
            artifacts=made,
            versions=dict(tool_versions()),
            timings=dict(timings or {}),
            warnings=list(warnings),
        )
        first = create_once(store, MANIFEST, encode(manifest))
        if not first:
            manifest = _standing(store)
    if not first:
        _require_same(store, manifest, key, artifacts)
    record = advance(run_store, manifest)
    return PublishReport(
        url=store.url,
        manifest=join_url(store.url, MANIFEST),
        fingerprint=key.fingerprint,
        files=len(manifest.files),
        bytes=sum(file.size for file in manifest.files),
        first=first,
        alias=record.manifest,
    )


def require_unchanged(url: str, listing: str, options: Mapping[str, Any]) -> None:
    """Raise `ChangedError` if the step's listing is not ``listing`` any more, or the step is gone."""
    try:
        unchanged = survey(url, **options).listing_identity == listing
    except NotFoundError:
        raise ChangedError(f"{url} was removed while it was being processed", code="files.missing") from None
    if not unchanged:
        raise ChangedError(
            f"{url} was written again while it was being processed", code="files.newer-than-metadata"
        )


def _require_stored(store: Store, artifacts: Sequence[Artifact]) -> None:
    """Every file must be there with the size, and where the store tells it the CRC-32C, that was sent."""
    if not any(artifact.files for artifact in artifacts):
        return
    try:
        found = {info.name: info for info in store.objects()}
    except NotFoundError:
        found = {}
    for file in (file for artifact in artifacts for file in artifact.files):
        info = found.get(file.name)
        if info is None:
            said = "it is not there"
        elif info.size != file.size:
            said = f"{info.size} bytes are stored, {file.size} were written"
        elif info.crc32c not in (None, file.crc32c):
            said = f"the CRC-32C of what is stored is {info.crc32c}, of what was written {file.crc32c}"
        else:
            continue
        raise EnvironmentFault(
            f"{store.url} does not hold the files that were exported to it: {file.name}: {said}; "
            "delete it to have it made again"
        )


def _require_equal(store: Store, artifacts: Sequence[Artifact]) -> None:
    """What the finished files hold must be the checkpoint's tensors: that is what published means.

    The bytes were digested on their way, so a store's own checksum of a file proves it. Where a store keeps
    none, as a disk, the tensors are digested again from the files.
    """
    for artifact in artifacts:
        kept = [(store.info(file.name).crc32c, file) for file in artifact.files]
        for checksum, file in kept:
            if checksum not in (None, file.crc32c):
                raise _unequal(store, file.name, f"its CRC-32C is {checksum}, expected {file.crc32c}")
        if any(checksum is None for checksum, _ in kept):
            for wrong in wrong_tensors(store, artifact):
                raise _unequal(store, artifact.name, f"{wrong.name}: {wrong.message}")


def _unequal(store: Store, name: str, why: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"{store.url}/{name} does not hold what was exported to it: {why}; suspect the store or disk, "
        f"and delete it to have it made again"
    )


def _standing(store: Store) -> Manifest:
    manifest = read_manifest(store)
    if manifest is None:
        raise EnvironmentFault(
            f"{store.url}/{MANIFEST} was there and is gone; somebody is deleting published steps"
        )
    return manifest


def _require_same(store: Store, manifest: Manifest, key: StepKey, artifacts: Sequence[Artifact]) -> None:
    """The manifest found must be of these bytes, and list the files that were exported here too."""
    if manifest.fingerprint != key.fingerprint:
        raise EnvironmentFault(
            f"{store.url} is the published place of other bytes (fingerprint {manifest.fingerprint})"
        )
    listed = {file.name: file.sha256 for file in manifest.files}
    for artifact in artifacts:
        for file in artifact.files:
            if file.name in listed and listed[file.name] != file.sha256:
                raise EnvironmentFault(
                    f"{store.url}/{file.name} was published with other content by {manifest.who}; "
                    f"check what is there now: {typed('ckpt', 'verify', store.url)}"
                )
