"""Do the files of an artifact hold the tensors and objects that its manifest lists, those and no others?

Tensors were digested from the checkpoint while it was exported. What the checkpoint's own digests do not
cover (objects, and tensors inside of them) `completed` digests from the finished files before they are
published; `wrong_tensors` digests everything from the files again.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field

from dcp.errors import CheckpointError
from dcp.exporting.certificate import Contents, digests, look_into
from dcp.exporting.report import ExportedTensor
from dcp.findings import Report
from dcp.storage import Store
from tasks.manifest import Artifact, PublishedTensor


class TensorCheck(Report):
    """A tensor of an artifact, or what is around a file's tensors, that is not what the manifest says."""

    artifact: str
    name: str
    message: str


@dataclass(slots=True)
class _Found:
    """What was read from an artifact's files."""

    contents: dict[str, Contents] = field(default_factory=dict)
    tensors: dict[str, ExportedTensor] = field(default_factory=dict)
    trouble: dict[str, str] = field(default_factory=dict)
    """Why a file could not be looked into, by its name."""


def completed(store: Store, artifact: Artifact) -> Artifact:
    """The artifact with digests of what is in its files beside the tensors that were digested already.

    Args:
        store: the published directory, in which the files stand.
        artifact: as it was exported.

    Raises:
        StorageError: a file cannot be read.
    """
    inner: dict[str, PublishedTensor] = {}
    frames: dict[str, str] = {}
    for file in artifact.files:
        try:
            contents = look_into(store, file.name)
        except CheckpointError:
            # Not a file with tensors, as an index is none: its SHA-256 is all there is to say.
            continue
        frames[file.name] = contents.frame
        others = {
            name: place
            for name, place in (contents.tensors | contents.strided).items()
            if name not in artifact.tensors
        }
        inner |= published(digests(store, file.name, others))
    return artifact.model_copy(update={"inner": inner, "frames": frames})


def published(tensors: Mapping[str, ExportedTensor]) -> dict[str, PublishedTensor]:
    """Tensors as a manifest lists them."""
    return {
        name: PublishedTensor(shape=list(tensor.shape), dtype=tensor.dtype, digest=tensor.digest)
        for name, tensor in tensors.items()
    }


def wrong_tensors(
    store: Store, artifact: Artifact, readable: Container[str] | None = None, *, whole: bool = True
) -> Iterator[TensorCheck]:
    """What an artifact's files do not hold, hold differently, or hold beyond what is listed.

    Args:
        store: the published directory.
        artifact: what it should hold.
        readable: names of the files worth reading; all if absent.
        whole: the artifact is `completed`; otherwise only its tensors are compared.

    Raises:
        StorageError: a file cannot be read.
    """
    found = _read(store, artifact, readable, whole=whole)

    def wrong(name: str, message: str) -> TensorCheck:
        return TensorCheck(artifact=artifact.name, name=name, message=message)

    why = "".join(f" ({trouble})" for trouble in found.trouble.values())
    wanted = artifact.tensors | artifact.inner
    for name, tensor in wanted.items():
        actual = found.tensors.get(name)
        if actual is None:
            yield wrong(name, f"the files do not hold it{why}")
        elif (actual.shape, actual.dtype) != (tensor.shape, tensor.dtype):
            yield wrong(name, f"{actual.dtype} {actual.shape}, expected {tensor.dtype} {tensor.shape}")
        elif actual.digest != tensor.digest:
            yield wrong(name, f"its digest is {actual.digest}, expected {tensor.digest}")
    for name, contents in found.contents.items():
        if contents.format != artifact.format:
            yield wrong(name, f"it is a {contents.format} file, expected {artifact.format}")
    if not whole:
        return
    for name in found.tensors.keys() - wanted.keys():
        yield wrong(name, "the manifest does not list it")
    for name, contents in found.contents.items():
        if contents.frame != artifact.frames.get(name):
            yield wrong(
                name,
                f"the digest of what is not tensors is {contents.frame}, "
                f"expected {artifact.frames.get(name, 'none')}: objects, names or types are others",
            )
    for name in artifact.frames.keys() & found.trouble.keys():
        yield wrong(name, f"what is in it cannot be told: {found.trouble[name]}")


def unlisted(store: Store, artifact: Artifact, readable: Container[str]) -> int:
    """How many tensors an artifact's files hold that it does not list.

    Raises:
        StorageError: a file cannot be read.
    """
    found = _read(store, artifact, readable, whole=False)
    names = {name for contents in found.contents.values() for name in [*contents.tensors, *contents.strided]}
    return len(names - artifact.tensors.keys())


def _read(store: Store, artifact: Artifact, readable: Container[str] | None, *, whole: bool) -> _Found:
    found = _Found()
    for file in artifact.files:
        if file.name.endswith(".json") or (readable is not None and file.name not in readable):
            continue
        try:
            contents = look_into(store, file.name)
            places = contents.tensors | contents.strided
            if not whole:
                places = {name: place for name, place in places.items() if name in artifact.tensors}
            read = digests(store, file.name, places)
        except CheckpointError as error:
            found.trouble[file.name] = str(error)
            continue
        found.contents[file.name] = contents
        found.tensors |= read
    return found
