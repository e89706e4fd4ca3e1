"""The stage *export*: a step's artifacts, streamed straight to where they will be published.

`export_step` runs `dcp.export` once for every configured artifact and checkpoint of the step. Files are
written below the published directory under their final names. Nobody may use them before the manifest
exists, each appears whole or not at all, and the same bytes exported again give the same files, so a second
worker or a second attempt replaces a file by its equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dcp.errors import NotFoundError, UsageError
from dcp.exporting.report import CastDtype, ExportReport
from dcp.findings import Report
from dcp.storage import Store, join_url
from tasks.manifest import Artifact, PublishedFile, PublishedTensor
from tasks.outcomes import boundary

if TYPE_CHECKING:
    from tasks.export_shards import MapShards

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """One artifact to make; the fields are the arguments of `dcp.export`."""

    format: Literal["torch", "safetensors"] = "torch"
    name: str = "checkpoint.pt"
    part: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rename: tuple[str, ...] = ()
    strip_prefix: str | None = None
    dtype: CastDtype | None = None
    tie: bool = False
    max_shard_size: int = 5_000_000_000
    memory_budget: int = 512 << 20
    allow_pickle: bool = False

    def arguments(self) -> dict[str, Any]:
        """What `dcp.export` is called with, apart from places."""
        return {
            "format": self.format,
            "include": self.include,
            "exclude": self.exclude,
            "rename": self.rename,
            "strip_prefix": self.strip_prefix,
            "dtype": self.dtype,
            "tie": self.tie,
            "max_shard_size": self.max_shard_size,
            "memory_budget": self.memory_budget,
            "allow_pickle": self.allow_pickle,
        }


class StepExport(Report):
    """All artifacts of a step."""

    artifacts: list[Artifact]


@boundary
def export_step(
    url: str,
    destination: str,
    *,
    parts: Sequence[str],
    requests: Sequence[ExportRequest],
    options: Mapping[str, Any],
    publish_options: Mapping[str, Any],
    progress: Progress | None = None,
    mapped: MapShards | None = None,
) -> StepExport:
    """Export a step.

    Args:
        url: the step's directory.
        destination: the published directory.
        parts: the checkpoints below ``url``; empty if it is one itself.
        requests: artifacts to make.
        options: fsspec options of the source.
        publish_options: fsspec options of the destination.
        progress: told about bytes.
        mapped: has the shards of safetensors written, for which nothing is told of progress.

    Raises:
        UsageError: a request names a part that the step does not have, or cannot be met.
        CheckpointError: the step cannot be exported.
        EnvironmentFault: storage, memory or disk failed; nothing half-written is visible.
    """
    from dcp.exporting import export
    from dcp.exporting.safetensors_layout import SUFFIX
    from tasks.export_shards import export_in_shards

    artifacts: list[Artifact] = []
    for one in single_exports(url, destination, parts=parts, requests=requests):
        arguments = {**one.request.arguments(), "sha256": True}
        if mapped is not None and one.request.format == "safetensors" and not one.name.endswith(SUFFIX):
            report = export_in_shards(
                one.source, one.dest, arguments, mapped, options=options, dest_options=publish_options
            )
        else:
            report = export(
                one.source,
                one.dest,
                progress=progress,
                dest_options=dict(publish_options),
                **arguments,
                **options,
            )
        artifacts.append(_artifact(one, report))
    return StepExport(artifacts=artifacts)


@dataclass(frozen=True, slots=True)
class SingleExport:
    """One artifact of one checkpoint of a step: what is read, and where it goes."""

    request: ExportRequest
    part: str
    """Of the step; empty for the step itself."""
    name: str
    """Relative to the published directory."""
    source: str
    """URL of the checkpoint."""
    dest: str
    """URL of the file, or of the directory of shards."""


def single_exports(
    url: str, destination: str, *, parts: Sequence[str], requests: Sequence[ExportRequest]
) -> Iterator[SingleExport]:
    """The exports of a step, in the order in which they are made; arguments as those of `export_step`.

    Raises:
        UsageError: a request, when its turn comes, names a part that the step does not have.
    """
    for request in requests:
        for part in _parts_of(request, parts):
            name = f"{part}/{request.name}" if part else request.name
            source = join_url(url, part) if part else url
            yield SingleExport(request, part, name, source, join_url(destination, name))


def _parts_of(request: ExportRequest, parts: Sequence[str]) -> Sequence[str]:
    """Of which of a step's ``parts`` an artifact is made; ``("",)`` is the step itself."""
    if not parts:
        if request.part:
            raise UsageError(
                f"the export {request.name} wants the part {request.part}; the step has no parts"
            )
        return ("",)
    if request.part is None:
        return parts
    if request.part not in parts:
        raise UsageError(
            f"the export {request.name} wants the part {request.part}; the step has {', '.join(parts)}"
        )
    return (request.part,)


def _artifact(one: SingleExport, report: ExportReport) -> Artifact:
    folder = one.name.rpartition("/")[0]
    return Artifact(
        name=one.name,
        part=one.part,
        format=one.request.format,
        options={k: v for k, v in one.request.arguments().items() if v not in ((), None, False)},
        files=[
            PublishedFile(
                name=f"{folder}/{file.name}" if folder else file.name,
                size=file.size,
                sha256=file.sha256,
                crc32c=file.crc32c,
            )
            for file in report.files
        ],
        tensors={
            key: PublishedTensor(shape=list(tensor.shape), dtype=tensor.dtype, digest=tensor.digest)
            for key, tensor in report.tensors.items()
        },
        tied=report.tied,
        bytes_read=report.bytes_read,
        bytes_written=report.bytes_written,
        seconds=report.seconds,
        peak_memory=report.peak_memory,
        findings=list(report.findings),
    )


def artifacts_stand(store: Store, artifacts: Sequence[Artifact]) -> bool:
    """Whether every file of ``artifacts`` is in the published directory with its size."""
    wanted = {file.name: file.size for artifact in artifacts for file in artifact.files}
    if not wanted:
        return True
    try:
        sizes = {info.name: info.size for info in store.objects()}
    except NotFoundError:
        return False
    return all(sizes.get(name) == size for name, size in wanted.items())
