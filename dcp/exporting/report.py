"""What an export will take (`ExportPlan`) and what it did (`ExportReport`)."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from dcp.errors import UsageError
from dcp.findings import Finding, Report

Format = Literal["torch", "safetensors"]
CastDtype = Literal["float16", "bfloat16", "float32", "float64"]
"""Types that floating tensors can be cast to."""


def require_fitting(dest: str, format: Format) -> None:
    """Refuse a format that is none, and a file name that promises another one than it would get.

    Raises:
        UsageError: it does, or there is no such format.
    """
    if format not in get_args(Format):
        raise UsageError(f"{format} is no format to export to; use one of {', '.join(get_args(Format))}")
    if format == "torch" and dest.endswith(".safetensors"):
        raise UsageError(
            f"{dest} would be a torch.save file; choose the format safetensors, or name it NAME.pt"
        )
    if format == "safetensors" and dest.endswith((".pt", ".pth", ".bin", ".ckpt")):
        raise UsageError(f"{dest} would be safetensors; name a directory or NAME.safetensors")


def is_directory(dest: str, format: Format) -> bool:
    """Whether the output is a directory of files, and not one file."""
    return format == "safetensors" and not dest.endswith(".safetensors")


class PlannedRead(Report):
    """A record: ``length`` bytes of an object of the checkpoint. Only what is needed of them is read."""

    file: str
    offset: int
    length: int


class PlannedTensor(Report):
    """A tensor of the output and what it is read from.

    ``offset`` is where its ``bytes`` begin in the output file; None where that depends on the data.
    """

    name: str
    dtype: str
    shape: list[int]
    offset: int | None
    bytes: int
    reads: list[PlannedRead]


class PlannedFile(Report):
    """One output file. ``bytes`` is what it will have, or about that if it is not ``exact``.

    It is not exact before objects are read, or ties looked for. ``tensors`` is empty without detail.
    """

    name: str
    bytes: int
    exact: bool
    tensors: list[PlannedTensor] = Field(default_factory=list)


class ExportPlan(Report):
    """What an export takes, from the index alone."""

    checkpoint: str
    dest: str
    format: Format
    files: list[PlannedFile]
    memory: int
    """Peak memory of the process, in bytes."""
    memory_available: int | None = None
    """Bytes that the process may take in all, by the machine and its cgroups; None where that is unknown."""
    disk: int
    """Bytes at the destination while writing and afterwards."""
    disk_free: int | None = None
    """Bytes free there; None where that cannot be known, as in a bucket."""
    refusals: list[str] = Field(default_factory=list)
    """Why the export would be refused here, each with what is needed and what there is."""
    bytes: int
    """Bytes read from the checkpoint; tensors that turn out to be tied are read once more."""
    ranges: int
    """Records that they are in."""
    sources: int
    """Objects of the checkpoint that the records are in."""
    seconds: float
    """Estimate of the duration."""
    rate: float
    """Bytes a second that the estimate assumes."""
    rate_measured: bool
    """Whether the rate was measured in earlier exports, and not guessed."""
    keys: int
    tensors: int


class ExportedFile(Report):
    """One output file. ``name`` relative to the destination's parent."""

    name: str
    size: int
    crc32c: str
    sha256: str | None = None
    """None where nobody asked for it."""


class ExportedTensor(Report):
    """One tensor of the output. ``digest`` is of its bytes in C order, independent of chunking."""

    shape: list[int]
    dtype: str
    digest: str
    cast_from: str | None = None
    """Its type in the checkpoint, if that was another one."""
    overflowed: int = 0
    """Elements that were finite there and became infinite in the cast."""


class ExportReport(Report):
    """What was written. ``ok`` means nothing that was asked for is missing from it in error."""

    checkpoint: str
    fingerprint: str
    dest: str
    format: Format
    dtype: CastDtype | None = None
    """What floating tensors were cast to."""
    tied: dict[str, str] = Field(default_factory=dict)
    """Tensors that repeat another one, by name, with the name of that one: one storage, or left out."""
    ok: bool
    files: list[ExportedFile]
    tensors: dict[str, ExportedTensor]
    bytes_read: int
    bytes_written: int
    seconds: float
    peak_memory: int
    """Largest resident size the process had so far, in bytes."""
    findings: list[Finding]
