"""`verify`: is a published step still what its manifest says, byte for byte?

Every file is streamed once through SHA-256 and CRC-32C in bounded memory. With ``deep`` every tensor is
digested from the finished files too, and compared with what was computed from the checkpoint when it was
exported. A manifest that names files outside its own directory is refused before anything is read.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Container, Iterator
from typing import Any, Literal

from pydantic import Field

from dcp.errors import CheckpointError, NotFoundError
from dcp.exporting.certificate import certify_object
from dcp.exporting.report import ExportedTensor
from dcp.findings import Report
from dcp.storage import ByteRange, ObjectInfo, Store, fetch, is_safe_name, open_store
from tasks.manifest import MANIFEST, Artifact, Manifest, PublishedFile, read_manifest
from tasks.outcomes import boundary

BLOCK = 16 << 20
"""Bytes of one read; four may be in flight."""

FileProblem = Literal["missing", "extra", "size", "sha256", "crc32c", "unsafe-name", "unreadable"]


class FileCheck(Report):
    """One file: what the manifest says (``size`` in bytes) and what is wrong with it."""

    name: str
    size: int
    problem: FileProblem | None = None
    message: str = ""


class TensorCheck(Report):
    """A tensor of an artifact that is not what the manifest says."""

    artifact: str
    name: str
    message: str


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
        CheckpointError: the manifest itself cannot be understood.
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
            message=f"not published: there is no {MANIFEST}",
        )
    checks = _compare(store, manifest, objects, progress)
    wrong = [check for check in checks if check.problem]
    readable = {check.name for check in checks if check.problem in (None, "sha256", "crc32c")}
    inside = [
        wrong for artifact in manifest.artifacts if deep for wrong in wrong_tensors(store, artifact, readable)
    ]
    tensors = sum(len(artifact.tensors) for artifact in manifest.artifacts)
    verdict = (
        f"{len(wrong)} of {len(checks)} files are wrong" if wrong else f"all {len(checks)} files are right"
    )
    if deep and tensors:
        verdict += f", {len(inside) or 'none'} of {tensors} tensors wrong"
    elif deep:
        verdict += ", and the manifest has no digests of tensors"
    hashed = sum(c.size for c in checks if c.problem in (None, "sha256", "crc32c"))
    return VerifyReport(
        url=store.url,
        published=True,
        ok=not wrong and not inside,
        run=manifest.run,
        step=manifest.step,
        fingerprint=manifest.fingerprint,
        files=checks,
        tensors=tensors if deep else None,
        wrong_tensors=inside,
        message=verdict,
        bytes=hashed,
        seconds=round(time.perf_counter() - started, 6),
    )


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


def wrong_tensors(
    store: Store, artifact: Artifact, readable: Container[str] | None = None
) -> Iterator[TensorCheck]:
    """Tensors that an artifact's files do not hold, or hold differently.

    Args:
        store: the published directory.
        artifact: what it should hold.
        readable: names of the files worth reading; all if absent.

    Raises:
        StorageError: a file cannot be read.
    """
    found: dict[str, ExportedTensor] = {}
    why = ""
    for file in artifact.files:
        worth = readable is None or file.name in readable
        if artifact.tensors and worth and not file.name.endswith(".json"):
            try:
                found |= certify_object(store, file.name)
            except CheckpointError as error:
                why = f" ({error})"
    for name, wanted in artifact.tensors.items():
        actual = found.get(name)
        if actual is None:
            message = f"the files do not hold it{why}"
        elif (actual.shape, actual.dtype) != (wanted.shape, wanted.dtype):
            message = f"{actual.dtype} {actual.shape}, expected {wanted.dtype} {wanted.shape}"
        elif actual.digest != wanted.digest:
            message = f"its digest is {actual.digest}, expected {wanted.digest}"
        else:
            continue
        yield TensorCheck(artifact=artifact.name, name=name, message=message)


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
