"""Does a manifest agree with itself and with the place it stands in?

`contradictions` reads nothing of the files. A directory that was copied somewhere else is not judged by its
new place: only below a publish root, known by the ledger in it, do the names of directories have to fit.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from dcp.errors import NotFoundError, UsageError
from dcp.exporting.safetensors_layout import SUFFIX
from dcp.storage import Store, open_store
from dcp.storage.urls import split_url
from tasks.ledger import DIRECTORY as LEDGER
from tasks.manifest import Artifact, Manifest

_FINGERPRINT = re.compile("[0-9a-f]{64}")


def contradictions(manifest: Manifest, store: Store) -> Iterator[str]:
    """What in a manifest cannot be true, one line each.

    Args:
        manifest: of a published directory.
        store: that directory.

    Raises:
        StorageError: storage failed.
    """
    yield from _identity(manifest)
    yield from _place(manifest, store)
    yield from _files(manifest)
    for artifact in manifest.artifacts:
        yield from _artifact(artifact, manifest.schema_version)


def _identity(manifest: Manifest) -> Iterator[str]:
    if not _FINGERPRINT.fullmatch(manifest.fingerprint):
        yield f"{manifest.fingerprint!r} is no fingerprint"
    if manifest.source.rstrip("/").rpartition("/")[2] != manifest.step:
        yield f"its source is {manifest.source}, which is not {manifest.step}"
    if manifest.number not in (int(digits) for digits in re.findall("[0-9]{1,4000}", manifest.step)):
        yield f"its number is {manifest.number}, which is not that of {manifest.step}"


def _place(manifest: Manifest, store: Store) -> Iterator[str]:
    try:
        step_url, short = split_url(store.url)
        run_url, step = split_url(step_url)
        run = split_url(run_url)[1]
        below = open_store(run_url, **store.options).directories()
    except (UsageError, NotFoundError):
        return
    if LEDGER not in below:
        return
    for said, stands, what in (
        (manifest.fingerprint[:8], short, "fingerprint"),
        (manifest.step, step, "step"),
        (manifest.run, run, "run"),
    ):
        if said != stands:
            yield f"its {what} is {said}, it stands in {stands}"


def _files(manifest: Manifest) -> Iterator[str]:
    listed = {file.name: file for file in manifest.files}
    for name, count in Counter(file.name for file in manifest.files).items():
        if count > 1:
            yield f"it lists {name} {count} times"
    owned = Counter(file.name for artifact in manifest.artifacts for file in artifact.files)
    # Version 1 did not name what is for people; there was nothing but the page.
    documents = manifest.documents
    if manifest.schema_version == 1:
        documents = [name for name in listed if name.endswith(".html")]
    owned.update(documents)
    for name, count in owned.items():
        if name not in listed:
            yield f"it lists {name} under an artifact or as a document, and not as a file"
        if count > 1:
            yield f"{name} is in {count} places among artifacts and documents"
    for name in manifest.documents:
        if name.endswith((SUFFIX, ".pt", ".pth", ".bin", ".ckpt")):
            yield f"a document holds tensors: {name} is of no artifact"
    for name in listed:
        if name not in owned:
            yield f"no artifact has the file {name}"
    for artifact in manifest.artifacts:
        for file in artifact.files:
            if listed.get(file.name, file) != file:
                yield f"{artifact.name} says another size or digest of {file.name} than the list of files"


def _artifact(artifact: Artifact, version: int) -> Iterator[str]:
    if not artifact.files:
        yield f"the artifact {artifact.name} has no files"
    folder = f"{artifact.name}/"
    for file in artifact.files:
        if file.name != artifact.name and not file.name.startswith(folder):
            yield f"{file.name} is not below the artifact {artifact.name}"
    if artifact.format not in ("torch", "safetensors"):
        yield f"{artifact.format!r} of {artifact.name} is no format"
    if artifact.options.get("format", artifact.format) != artifact.format:
        yield f"{artifact.name} is {artifact.format}, it was asked for as {artifact.options['format']}"
    if artifact.part and not artifact.name.startswith(f"{artifact.part}/"):
        yield f"{artifact.name} is not below its part {artifact.part}"
    size = sum(file.size for file in artifact.files)
    if artifact.bytes_written != size:
        yield f"{artifact.name} took {artifact.bytes_written} bytes, its files have {size}"
    for name, kept in artifact.tied.items():
        tensors = artifact.tensors
        if kept not in tensors or tensors.get(name, tensors[kept]).digest != tensors[kept].digest:
            yield f"{artifact.name}: {name} is said to repeat {kept}, and does not"
    if version == 1:
        return
    for name in artifact.frames:
        if name not in (file.name for file in artifact.files):
            yield f"{artifact.name} has a digest of what is in {name}, and not the file"
    for file in artifact.files:
        if file.name.endswith(SUFFIX) and file.name not in artifact.frames:
            yield f"{artifact.name} has no digest of what is in {file.name} beside its tensors"
