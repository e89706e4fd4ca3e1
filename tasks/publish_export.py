"""Publishing by hand: files that `ckpt export` wrote somewhere, under the name that consumers trust.

`publish_export` copies them once, hashing on the way, into the published directory of the step they were
exported from, and then publishes that directory as the lifecycle does. The step must validate now, the files
must be whole, and what bears the name of one of the step's tensors must be that tensor. For objects and for
tensors that are none of the step's whoever publishes by hand vouches: the manifest says which they are, and
who that was. The ledger then knows the step as published, so the lifecycle leaves it alone.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dcp.checkpoint import survey
from dcp.errors import ChangedError, NotFoundError, NotLoadableError, UsageError
from dcp.exporting.provenance import provenance
from dcp.exporting.sink import HashingSink
from dcp.findings import Finding, errors_of, has_errors
from dcp.storage import ByteRange, Sink, Store, fetch, open_parent
from dcp.storage.urls import split_url
from dcp.validation import validate
from tasks.discover import describe, judge
from tasks.foreign_files import open_export
from tasks.ledger import DONE, Ledger, StepKey
from tasks.manifest import Artifact, Manifest, PublishedFile, published_directory, read_manifest
from tasks.outcomes import boundary
from tasks.publish import PublishReport, publish_step
from tasks.tensor_check import published as published_tensors

BLOCK = 16 << 20
"""Bytes of one read; four may be in flight."""

_Told = Callable[[int], None]


@boundary
def publish_export(
    export: str,
    url: str,
    publish_root: str,
    *,
    run: str,
    number: int,
    grace_seconds: float,
    newer_seconds: float,
    copied: bool = False,
    progress: Callable[[int, int], None] | None = None,
    options: Mapping[str, Any],
    publish_options: Mapping[str, Any],
) -> PublishReport:
    """Publish existing files as an artifact of a step.

    Args:
        export: a file, or a directory of files.
        url: the step's directory in the source.
        publish_root: as in the settings.
        run: the run's name.
        number: the step's number.
        grace_seconds, newer_seconds, copied: as `dcp.validation.validate` takes them.
        progress: told bytes done and bytes in all.
        options: fsspec options of the source.
        publish_options: fsspec options of the publish root.

    Raises:
        UsageError: there is no such export, or the step is published already with other files.
        CheckpointError: the export is damaged, holds no tensors, or changed while it was copied.
        NotLoadableError: the step does not validate, or the export holds others under the names of its
            tensors; carries the findings.
        EnvironmentFault: storage failed.
    """
    source, names = _files(export)
    step = split_url(url)[1]
    found = survey(url, **options)
    report = validate(url, copied=copied, grace_seconds=grace_seconds, newer_seconds=newer_seconds, **options)
    if not report.ok:
        errors = list(errors_of(report.findings))
        raise NotLoadableError(f"{url} ({report.state}) does not validate, so it is not published", errors)
    key = StepKey(step, report.fingerprint)
    ledger = Ledger.open(publish_root, run, **publish_options)
    store = ledger.run_store.child(published_directory(key))
    told = _counter(sum(names.values()), progress)
    started = time.perf_counter()
    standing = read_manifest(store)
    opened = None
    foreign: list[Finding] = []
    if standing is None:
        before = _identities(source, names)
        opened = open_export(source, names, export)
        foreign = [*provenance(found.checkpoint, opened.tensors).findings(), *opened.findings]
        if has_errors(foreign):
            raise NotLoadableError(f"{export} is not an export of {url}", list(errors_of(foreign)))
        files = [_copied(source, name, size, store, told) for name, size in names.items()]
        if _identities(source, names) != before:
            raise ChangedError(f"{export} was written again while it was copied", code="records.corrupt")
    else:
        files = [_hashed(source, name, size, _Nowhere(), told) for name, size in names.items()]
        _require_published(store, standing, files)
    artifact = Artifact(
        name=split_url(export)[1],
        format=opened.format if opened else "torch",
        files=files,
        tensors=published_tensors(opened.tensors) if opened else {},
        findings=foreign,
        bytes_written=sum(file.size for file in files),
        seconds=round(time.perf_counter() - started, 6),
    )
    warnings = [said for said in [*report.findings, *foreign] if said.severity == "warning"]
    published = publish_step(
        url,
        publish_root,
        run=run,
        number=number,
        key=key,
        listing=found.listing_identity,
        artifacts=[artifact],
        warnings=warnings,
        timings={"export": artifact.seconds},
        options=options,
        publish_options=publish_options,
    )
    if not published.first:
        _withdraw(store, files)
    seen = describe(judge(step, number, found, parts=(), grace_seconds=grace_seconds, now=time.time()))
    ledger.create(key, "seen", seen)
    ledger.create(key, DONE["export"], {"artifacts": [artifact.model_dump(mode="json")], "by_hand": True})
    ledger.create(key, DONE["publish"], published.model_dump(mode="json", exclude={"first"}))
    return published.model_copy(update={"findings": foreign})


def _identities(store: Store, names: Iterable[str]) -> dict[str, str]:
    """What changes whenever one of the files is written again."""
    return {name: store.info(name).identity for name in names}


def _files(export: str) -> tuple[Store, dict[str, int]]:
    """The store in which the export's files lie, and their names there with sizes in bytes."""
    parent, name = open_parent(export)
    try:
        return parent, {name: parent.info(name).size}
    except NotFoundError:
        pass  # perhaps a directory, which is no object
    try:
        inside = {f"{name}/{info.name}": info.size for info in parent.child(name).objects()}
    except NotFoundError:
        inside = {}
    if not inside:
        command = f"ckpt export URL {shlex.quote(export)}"
        raise UsageError(f"there is no export at {export}; write one with: {command}")
    return parent, inside


def _require_published(store: Store, manifest: Manifest, files: Sequence[PublishedFile]) -> None:
    """What is published does not change: only the same files may be published again."""
    if not all(file in manifest.files for file in files):
        raise UsageError(
            f"{store.url} is published already, with other content "
            f"({', '.join(file.name for file in manifest.files)}); a step is published once"
        )


def _withdraw(store: Store, files: Sequence[PublishedFile]) -> None:
    """Remove what was copied while somebody else published other files; raise if that happened."""
    manifest = read_manifest(store)
    listed = {file.name for file in manifest.files} if manifest else set()
    for file in files:
        if file.name not in listed:
            store.remove(file.name)
    if manifest is not None:
        _require_published(store, manifest, files)


class _Nowhere:
    """Takes bytes that only need to be hashed."""

    def write(self, data: bytes | bytearray | memoryview, /) -> int:
        return len(data)


def _copied(source: Store, name: str, size: int, target: Store, told: _Told) -> PublishedFile:
    with target.writer(name) as writer:
        return _hashed(source, name, size, writer, told)


def _hashed(source: Store, name: str, size: int, target: Sink, told: _Told) -> PublishedFile:
    """Stream a file to ``target`` and return its digests."""
    blocks = (ByteRange(name, start, min(start + BLOCK, size)) for start in range(0, size, BLOCK))
    with HashingSink(target) as sink:
        for block, data in fetch(source, blocks, budget=4 * BLOCK):
            sink.write(data)
            told(block.length)
    return PublishedFile(name=name, size=sink.size, sha256=sink.sha256, crc32c=sink.crc32c)


def _counter(total: int, progress: Callable[[int, int], None] | None) -> _Told:
    """Turns bytes of one block after the other into bytes done and bytes in all."""
    done = 0

    def told(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    return told
