"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def parse_size(text: str) -> int:
    """Bytes in ``512MiB``, ``5GB`` or a bare number."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        size = TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        size = ByteSize(0)
    if size <= 0:
        raise typer.BadParameter("should be a size such as 512MiB or 5GB")
    return size


def parse_span(text: str) -> float:
    """Seconds in ``90s``, ``30m``, ``2h``, ``1d`` or a bare number of seconds."""
    from flows.sections import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def complete_layout(incomplete: str) -> list[str]:
    """Layouts that a shell offers for what is typed so far: the usual ones, with a tp axis after a comma."""
    sizes = [2**power for power in range(1, 11)]
    offered = [f"fsdp={size}" for size in sizes] + [
        f"fsdp={size},tp={tp}" for size in sizes for tp in (2, 4, 8)
    ]
    return [layout for layout in offered if layout.startswith(incomplete)]


CheckpointUrl = Annotated[str, typer.Argument(metavar="URL", help="The checkpoint: what holds .metadata.")]

SETTINGS_FILE = Path("lifecycle.toml")

Config = Annotated[
    Path,
    typer.Option("--config", "-c", metavar="FILE", help="The settings file."),
]

MemoryBudget = Annotated[
    int,
    typer.Option(
        "--memory-budget", metavar="SIZE", parser=parse_size, help="Bytes of tensors to hold at a time."
    ),
]

Copied = Annotated[
    bool,
    typer.Option("--copied", help="This is a copy: data newer than .metadata is only a warning."),
]

Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="CLASS",
        help="A class that saved objects may ask for, as pkg.mod.Class or pkg.*; may be repeated.",
    ),
]
