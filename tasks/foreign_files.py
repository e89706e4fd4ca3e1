"""Files that this program did not necessarily write, opened before they are published.

`open_export` refuses what torch or safetensors could not read whole, and gives a digest of every tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dcp.errors import CheckpointError, RecordError, UsageError
from dcp.exporting.certificate import Contents, digests, require_sound
from dcp.exporting.report import ExportedTensor, Format
from dcp.findings import Finding, finding
from dcp.storage import Store

_TENSORS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_INDEX = ".index.json"
_INDEX_LIMIT = 1 << 28
"""Largest index read, in bytes."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What the files of an export hold."""

    format: Format
    tensors: Mapping[str, ExportedTensor]
    findings: tuple[Finding, ...]
    """Names the files that hold no tensors, of which nothing is known."""


def open_export(store: Store, names: Iterable[str], export: str) -> Opened:
    """Read every file with tensors whole, against its own CRCs or sizes, and digest the tensors.

    Args:
        store: where the files are.
        names: of the files.
        export: what people call them.

    Raises:
        CheckpointError: a file is damaged, or none of them holds tensors.
        UsageError: they are of both formats.
        StorageError: storage failed.
    """
    names = sorted(names)
    found: dict[str, Contents] = {}
    other: list[str] = []
    for name in names:
        if name.endswith(_TENSORS) or len(names) == 1:
            found[name] = require_sound(store, name)
        elif not name.endswith(_INDEX):
            other.append(name)
    formats = {contents.format for contents in found.values()}
    if not formats:
        raise CheckpointError(
            f"{export} holds no torch.save and no safetensors file; write one with: ckpt export URL DEST",
            code="records.undecodable",
        )
    if len(formats) > 1:
        raise UsageError(f"{export} holds torch.save and safetensors files; publish one of the two")
    for name in names:
        if name.endswith(_INDEX):
            _require_fitting(store, name, found)
    tensors: dict[str, ExportedTensor] = {}
    for name, contents in found.items():
        tensors |= digests(store, name, contents.tensors)
    said = [
        finding("publish.foreign", f"{name} holds no tensors: it is on the publisher's word", file=name)
        for name in other
    ]
    return Opened(formats.pop(), tensors, tuple(said))


def _require_fitting(store: Store, name: str, found: Mapping[str, Contents]) -> None:
    """An index must lead to every tensor, where it stands."""
    try:
        document = json.loads(store.read(name, _INDEX_LIMIT))
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{name} is not JSON: {error}", file=name) from None
    listed = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(listed, dict):
        raise RecordError(f"{name} has no weight_map", file=name)
    folder = name.rpartition("/")[0]
    inside = {
        key: file.rpartition("/")[2]
        for file, contents in found.items()
        if file.rpartition("/")[0] == folder
        for key in (*contents.tensors, *contents.strided)
    }
    for key in sorted(listed.keys() | inside.keys()):
        if listed.get(key) != inside.get(key):
            raise RecordError(
                f"{name} says that {key} stands in {listed.get(key, 'no file')}; "
                f"it stands in {inside.get(key, 'none')}",
                key=key,
                file=name,
            )
