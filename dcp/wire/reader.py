"""`load`: the bytes of `.metadata` to the values of `dcp.wire.values`."""

from __future__ import annotations

from dataclasses import dataclass

from dcp.collector import gc_paused
from dcp.errors import MetadataError
from dcp.wire.machine import IndexMachine
from dcp.wire.runs import Restart, Runs
from dcp.wire.values import METADATA, Instance

RUNS_FROM = 1 << 18
"""Size in bytes from which on an index is read faster with numpy than its import takes."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A read index.

    Attributes:
        metadata: the `Metadata` object. Lists of chunks and `storage_data` may hold `dcp.wire.runs.Run`.
        names: the texts that runs refer to by number.
        machine: what read it, for the bound on work (`IndexMachine.spend`).
    """

    metadata: Instance
    names: list[str]
    machine: IndexMachine


def load(data: bytes, file: str = ".metadata", *, runs: bool | None = None) -> Loaded:
    """Read the pickle of a `.metadata` object.

    Args:
        data: its content.
        file: its name, for messages.
        runs: whether repeated items may be decoded at once; the result means the same either way. By default
            they are where that is worth the import of numpy.

    Raises:
        MetadataError: ``metadata.empty``, ``metadata.unreadable`` or ``metadata.unsafe``.
    """
    if not data:
        raise MetadataError(f"{file} is empty", code="metadata.empty", file=file)
    with gc_paused():
        skip = len(data) >= RUNS_FROM if runs is None else runs
        machine = IndexMachine(data, file, Runs() if skip else None)
        try:
            loaded = machine.run()
        except Restart:
            machine = IndexMachine(data, file)
            loaded = machine.run()
    if type(loaded) is not Instance or loaded.known is not METADATA:
        raise MetadataError(
            f"{file} holds {type(loaded).__name__}, not checkpoint metadata",
            code="metadata.unreadable",
            file=file,
        )
    names = machine.runs.names if machine.runs is not None else []
    return Loaded(loaded, names, machine)
