"""`verify`: is a published step still what its manifest says, byte for byte?

Every file is streamed once through SHA-256 and CRC-32C in bounded memory. With ``deep`` every tensor is
digested from the finished files too, and compared with what was computed from the checkpoint when it was
exported; whatever is in the files beside them is held against digests that were taken when it was published.
A manifest that was changed is refused (`read_manifest`), one that contradicts itself or its place is told
(`contradictions`), and no name in it leads outside its own directory.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal

from pydantic import Field

from dcp.errors import CheckpointError, NotFoundError
from dcp.findings import Report
from dcp.storage import ByteRange, ObjectInfo, Store, fetch, is_safe_name, open_store
from tasks.contradictions import contradictions
from tasks.manifest import MANIFEST, Artifact, Manifest, PublishedFile, none_here, read_manifest
from tasks.outcomes import boundary
from tasks.tensor_check import TensorCheck, unlisted, wrong_tensors

BLOCK = 16 << 20
"""Bytes of one read; four may be in flight."""

FileProblem = Literal["missing", "extra", "size", "sha256", "crc32c", "unsafe-name", "unreadable"]


class FileCheck(Report):
    """One file: what the manifest says (``size`` in bytes) and what is wrong with it."""

    name: str
    size: int
    problem: FileProblem | None = None
    message: str = ""


class VerifyReport(Report):
    """The verdict on a published directory. ``published`` is False where there is no manifest."""

    url: str
    published: bool
    ok: bool
    run: str | None = None
    step: str | None = None
    fingerprint: str | None = None
    files: list[FileCheck]
    tensors: int | None = None
    """How many tensors were compared; None where that was not asked for."""
    wrong_tensors: list[TensorCheck] = Field(default_factory=list)
    contradictions: list[str] = Field(default_factory=list)
    """What the manifest says that cannot be true."""
    unproven: list[str] = Field(default_factory=list)
    """What a manifest of an earlier version cannot prove."""
    message: str
    bytes: int = 0
    """Bytes read and hashed."""
    seconds: float = 0.0


@boundary
def verify(
    published_url: str,
    *,
    deep: bool = False,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> VerifyReport:
    """Hash every file of a published directory and compare with its manifest.

    Args:
        published_url: the directory, or its ``manifest.json``.
        deep: compare every tensor's digest as well.
        progress: told bytes done and bytes in all.
        options: passed to the filesystem.

    Raises:
        CheckpointError: the manifest itself cannot be understood, or was changed.
        StorageError: storage failed, which says nothing of the artifact.
    """
    started = time.perf_counter()
    store = open_store(published_url.removesuffix(f"/{MANIFEST}"), **options)
    objects = {info.name: info for info in store.objects()}
    manifest = read_manifest(store)
    if manifest is None:
        return VerifyReport(
            url=store.url,
            published=False,
            ok=False,
            files=[],
            message=f"not published: {none_here(store)}",
        )
    untrue = list(contradictions(manifest, store))
    checks = _compare(store, manifest, objects, progress)
    wrong = [check for check in checks if check.problem]
    readable = {check.name for check in checks if check.problem in (None, "sha256", "crc32c")}
    unproven = list(_unproven(store, manifest, readable, deep=deep))
    inside = list(_inside(store, manifest, readable)) if deep else []
    tensors = sum(len(artifact.tensors) + len(artifact.inner) for artifact in manifest.artifacts)
    verdict = (
        f"{len(wrong)} of {len(checks)} files are wrong" if wrong else f"all {len(checks)} files are right"
    )
    if deep:
        verdict += f", {len(inside) or 'nothing'} wrong in {tensors} tensors and what is around them"
    if untrue:
        verdict += f", and the manifest contradicts itself or its place: {untrue[0]}"
    hashed = sum(c.size for c in checks if c.problem in (None, "sha256", "crc32c"))
    return VerifyReport(
        url=store.url,
        published=True,
        ok=not wrong and not inside and not untrue,
        run=manifest.run,
        step=manifest.step,
        fingerprint=manifest.fingerprint,
        files=checks,
        tensors=tensors if deep else None,
        wrong_tensors=inside,
        contradictions=untrue,
        unproven=unproven,
        message=verdict,
        bytes=hashed,
        seconds=round(time.perf_counter() - started, 6),
    )


def _inside(store: Store, manifest: Manifest, readable: Collection[str]) -> Iterator[TensorCheck]:
    """What is wrong inside of the files."""
    for artifact in manifest.artifacts:
        yield from wrong_tensors(store, artifact, readable, whole=manifest.schema_version > 1)
        # Objects are not in safetensors, so version 1 listed all that such a file holds.
        if manifest.schema_version == 1 and artifact.format == "safetensors" and not _by_hand(artifact):
            count = unlisted(store, artifact, readable)
            if count:
                message = f"the files hold {count} tensors that the manifest does not list"
                yield TensorCheck(artifact=artifact.name, name=artifact.name, message=message)


def _unproven(store: Store, manifest: Manifest, readable: Collection[str], *, deep: bool) -> Iterator[str]:
    """What a manifest of version 1 leaves open."""
    if manifest.schema_version > 1:
        return
    yield "the manifest is of version 1, which has no seal: a change to it is noticed only by a contradiction"
    for artifact in manifest.artifacts if deep else ():
        if _by_hand(artifact):
            yield f"{artifact.name} was published by hand: there are no digests of its tensors"
        elif artifact.format == "torch":
            count = unlisted(store, artifact, readable)
            yield (
                f"{artifact.name}: version 1 has no digests of objects, nor of tensors inside of them "
                f"({count} tensors in the file are not listed)"
            )


def _by_hand(artifact: Artifact) -> bool:
    """Whether version 1 has no digests because nothing was read from a checkpoint."""
    return not artifact.tensors and not artifact.options and not artifact.bytes_read


def _compare(
    store: Store,
    manifest: Manifest,
    objects: dict[str, ObjectInfo],
    progress: Callable[[int, int], None] | None,
) -> list[FileCheck]:
    listed = {file.name for file in manifest.files}
    total = sum(file.size for file in manifest.files)
    done = 0
    checks = []
    for file in manifest.files:

        def report(count: int, before: int = done) -> None:
            if progress is not None:
                progress(before + count, total)

        checks.append(_check(store, file, objects, report))
        done += file.size
    for name, info in objects.items():
        if name not in listed and name != MANIFEST:
            checks.append(
                FileCheck(name=name, size=info.size, problem="extra", message="the manifest does not list it")
            )
    return checks


def _check(
    store: Store, file: PublishedFile, objects: dict[str, ObjectInfo], progress: Callable[[int], None]
) -> FileCheck:
    def wrong(problem: FileProblem, message: str) -> FileCheck:
        return FileCheck(name=file.name, size=file.size, problem=problem, message=message)

    if not is_safe_name(file.name) or file.name == MANIFEST:
        return wrong("unsafe-name", "the name leads outside the published directory")
    info = objects.get(file.name)
    if info is None:
        return wrong("missing", "the file is not there")
    if info.size != file.size:
        return wrong("size", f"{info.size} bytes, expected {file.size}")
    try:
        sha256, crc32c = _digests(store, file.name, file.size, progress)
    except NotFoundError:
        return wrong("missing", "the file was removed while it was being read")
    except CheckpointError as error:
        return wrong("unreadable", str(error))
    if sha256 != file.sha256:
        return wrong("sha256", f"SHA-256 is {sha256}, expected {file.sha256}")
    if crc32c != file.crc32c:
        return wrong("crc32c", f"CRC-32C is {crc32c}, expected {file.crc32c}")
    return FileCheck(name=file.name, size=file.size)


def _digests(store: Store, name: str, size: int, progress: Callable[[int], None]) -> tuple[str, str]:
    import google_crc32c

    sha256 = hashlib.sha256()
    crc = google_crc32c.Checksum()
    blocks = (ByteRange(name, start, min(start + BLOCK, size)) for start in range(0, size, BLOCK))
    for block, data in fetch(store, blocks, budget=4 * BLOCK):
        sha256.update(data)
        crc.update(data)
        progress(block.end)
    return sha256.hexdigest(), crc.digest().hex()
