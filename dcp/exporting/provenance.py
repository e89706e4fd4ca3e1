"""Which tensors of a finished file are those of a checkpoint, whoever wrote the file.

`provenance` holds digests of a file's tensors against digests of the checkpoint's, read in bounded memory,
and sorts them into a `Provenance`: what is the checkpoint's, under its own name or another, or cast; what
bears the name of one of its tensors and is not that; and what nothing can be said of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dcp.checkpoint import Checkpoint
from dcp.dtypes import FLOATING
from dcp.exporting.pump import Pump
from dcp.exporting.report import ExportedTensor
from dcp.exporting.selection import Selection, select
from dcp.exporting.tensor_stream import OutTensor, TensorStream
from dcp.findings import Finding, finding
from dcp.index import TensorEntry
from dcp.records import Records

_BAND = 4 << 20
"""Bytes of a tensor read at once."""
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Provenance:
    """Names of a file's tensors by where they come from."""

    same: tuple[str, ...]
    """The checkpoint's own, under their own names."""
    renamed: Mapping[str, str]
    """The checkpoint's own under another name, with the name there."""
    cast: Mapping[str, str]
    """The checkpoint's in another floating type, with the type there."""
    different: tuple[str, ...]
    """Of name, shape and type of one of the checkpoint's, and with other content."""
    unknown: tuple[str, ...]
    """None of these."""

    def findings(self) -> Iterator[Finding]:
        """What to tell: an error for what is different or if nothing is the checkpoint's."""
        if self.different:
            yield finding(
                "publish.foreign",
                f"{_named(self.different)} differ from the step's tensors of the same names",
                key=self.different[0],
                severity="error",
                keys=list(self.different),
            )
        if self.unknown:
            yield finding(
                "publish.foreign",
                f"{_named(self.unknown)} are none of the step's tensors: they are on the publisher's word",
                key=self.unknown[0],
                severity=None if self.same or self.renamed or self.cast else "error",
                keys=list(self.unknown),
            )
        for moved, what in ((self.renamed, "under another name"), (self.cast, "cast to another type")):
            if moved:
                yield finding(
                    "publish.foreign",
                    f"{_named(tuple(moved))} are the step's tensors {what}",
                    key=next(iter(moved)),
                    severity="info",
                    keys=dict(moved),
                )


def provenance(checkpoint: Checkpoint, tensors: Mapping[str, ExportedTensor]) -> Provenance:
    """Compare a file's tensors with a checkpoint's.

    Args:
        checkpoint: what they are said to come from.
        tensors: of the file, by dotted name, as `certify` gives them.

    Raises:
        CheckpointError: a chunk of the checkpoint is damaged.
        StorageError: storage failed.
    """
    chosen = select(checkpoint.index, Selection())
    own = {item.key: item.entry for item in chosen if isinstance(item.entry, TensorEntry)}
    wanted = {(tensor.dtype, tuple(tensor.shape)) for tensor in tensors.values()}
    plain = [OutTensor(e, name, e.dtype) for name, e in own.items() if (e.dtype, tuple(e.shape)) in wanted]
    casts = [
        OutTensor(own[name], name, tensor.dtype)
        for name, tensor in tensors.items()
        if name in own and _castable(own[name], tensor)
    ]
    there, cast = _digests(checkpoint, plain), _digests(checkpoint, casts)
    by_content = {_content(tensor): name for name, tensor in reversed(there.items())}
    same, renamed, casted, different, unknown = [], {}, {}, [], []
    for name, tensor in tensors.items():
        if name in there and _content(there[name]) == _content(tensor):
            same.append(name)
        elif name in there and _kind(there[name]) == _kind(tensor):
            different.append(name)
        elif _content(tensor) in by_content:
            renamed[name] = by_content[_content(tensor)]
        elif name in cast and cast[name].digest == tensor.digest:
            casted[name] = own[name].dtype
        else:
            unknown.append(name)
    return Provenance(tuple(same), renamed, casted, tuple(different), tuple(unknown))


def _kind(tensor: ExportedTensor) -> tuple[str, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)


def _content(tensor: ExportedTensor) -> tuple[str, tuple[int, ...], str]:
    return *_kind(tensor), tensor.digest


def _castable(entry: TensorEntry, tensor: ExportedTensor) -> bool:
    types = (entry.dtype, tensor.dtype)
    return (
        tuple(entry.shape) == tuple(tensor.shape)
        and types[0] != types[1]
        and all(each in _CASTS for each in types)
    )


_CASTS = FLOATING & {"float16", "bfloat16", "float32", "float64"}


def _digests(checkpoint: Checkpoint, order: list[OutTensor]) -> dict[str, ExportedTensor]:
    threads = 8 if "://" in checkpoint.url else 2
    pump = Pump(Records(checkpoint.store, checkpoint.objects), band_bytes=_BAND, threads=threads)
    stream = TensorStream(pump, order)
    for tensor in order:
        for _ in stream.pieces(tensor):
            pass
    stream.finish()
    return stream.tensors


def _named(names: tuple[str, ...]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
