"""The published layout: which files a step was published as, and what proves that they are whole.

Below ``<publish root>/<run>/<step>/<fingerprint8>/`` stand the artifact's files and, created last and only
if absent, ``manifest.json``. A directory without it is not published, whatever else it holds. File names in
a `Manifest` are relative to its directory.

Since version 2 a manifest carries a digest of itself (`encode`, `read_manifest`), which shows any change to
it. It is no signature: whoever can write there can also make a whole new manifest.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dcp.errors import CheckpointError, NotFoundError
from dcp.findings import Finding
from dcp.storage import Store
from tasks.ledger import StepKey

MANIFEST = "manifest.json"
MANIFEST_LIMIT = 1 << 30
"""Largest manifest read, in bytes; a tensor takes about 150."""

_TOOLS = ("ckpt-lifecycle", "torch", "safetensors", "numpy", "prefect", "fsspec", "gcsfs", "s3fs")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class PublishedFile(_Part):
    """One file. ``size`` in bytes, digests in lower-case hexadecimal."""

    name: str
    size: int
    sha256: str
    crc32c: str


class PublishedTensor(_Part):
    """One tensor of an artifact. ``digest`` is of its content in C order, however it was chunked."""

    shape: list[int]
    dtype: str
    digest: str


class Artifact(_Part):
    """One export: its files, its tensors, how it was made and what it cost."""

    name: str
    """File or directory, relative to the published directory."""
    part: str = ""
    """Checkpoint within the step, empty if it is the step."""
    format: str
    options: dict[str, Any] = Field(default_factory=dict)
    files: list[PublishedFile]
    tensors: dict[str, PublishedTensor] = Field(default_factory=dict)
    tied: dict[str, str] = Field(default_factory=dict)
    """Tensors that repeat another one, with that one's name: they share its storage, or are left out."""
    inner: dict[str, PublishedTensor] = Field(default_factory=dict)
    """Tensors inside of objects, digested from the finished file; of one that does not stand in C order the
    bytes from its first element to its last."""
    frames: dict[str, str] = Field(default_factory=dict)
    """For every file with tensors a digest of all that is no tensor: its pickle with every object, or its
    header."""
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    peak_memory: int = 0
    findings: list[Finding] = Field(default_factory=list)


class Manifest(_Part):
    """Content of ``manifest.json``. ``created`` is UTC in ISO 8601; ``timings`` are seconds a stage."""

    schema_version: Literal[1, 2] = 2
    """1 has no ``documents``, ``inner``, ``frames`` and ``seal``."""
    run: str
    step: str
    number: int
    source: str
    fingerprint: str
    created: str
    who: str
    files: list[PublishedFile]
    """Every file of the directory but the manifest."""
    documents: list[str] = Field(default_factory=list)
    """Names of the files that are for people and of no artifact."""
    artifacts: list[Artifact]
    versions: dict[str, str]
    timings: dict[str, float]
    warnings: list[Finding]
    seal: str = ""
    """Digest of the rest, which `encode` puts there."""


def published_directory(key: StepKey) -> str:
    """Where bytes are published, relative to the run's directory."""
    return f"{key.step}/{key.short}"


def read_manifest(store: Store) -> Manifest | None:
    """The manifest of a published directory; None if it has none.

    Raises:
        CheckpointError: there is one that cannot be understood.
        StorageError: it cannot be read.
    """
    try:
        data = store.read(MANIFEST, MANIFEST_LIMIT)
    except NotFoundError:
        return None
    try:
        found = Manifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "document"
        raise _damaged(store, f"is no manifest: {field}: {first['msg']}") from None
    if found.schema_version == 1:
        if found.seal or found.documents or any(a.inner or a.frames for a in found.artifacts):
            raise _damaged(store, "was changed: it says that it is of version 1, and has fields of version 2")
    elif found.seal != _seal(json.loads(data)):
        raise _damaged(store, "was changed after it was published: its seal does not fit")
    return found


def encode(manifest: Manifest) -> bytes:
    """The document to write, with the seal that fits."""
    document = json.loads(manifest.model_dump_json())
    document["seal"] = _seal(document)
    return json.dumps(document, indent=1, ensure_ascii=False).encode()


def _seal(document: dict[str, Any]) -> str:
    """Digest of all fields but the seal, whatever their order and the white space between them."""
    rest = {name: value for name, value in document.items() if name != "seal"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def none_here(store: Store) -> str:
    """That a directory has no manifest, and the place below it that has one, for who left that out."""
    try:
        names = [info.name for info in store.objects()]
    except NotFoundError:
        names = []
    below = sorted(name for name in names if name.endswith(f"/{MANIFEST}"))
    hint = f", but one below it: {store.url}/{below[-1].removesuffix(f'/{MANIFEST}')}" if below else ""
    return f"there is no {MANIFEST}{hint}"


def _damaged(store: Store, why: str) -> CheckpointError:
    return CheckpointError(f"{store.url}/{MANIFEST} {why}", code="manifest.damaged", file=MANIFEST)


def tool_versions() -> Mapping[str, str]:
    """Versions of what made the artifact, without importing any of it."""
    found = {"python": platform.python_version()}
    for name in _TOOLS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
