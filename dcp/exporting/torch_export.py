"""Exporting to one `torch.save` file: the plan from the index, and the stream that follows it.

A byte passes index → bands → pump → writer → sink once. Objects are read before anything is written,
because the file begins with the pickle that holds them; tensors' bytes follow it band by band.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from dcp.archive import Archive
from dcp.checkpoint import Checkpoint
from dcp.columns import RecordColumns
from dcp.dtypes import ITEMSIZE
from dcp.errors import CheckpointError, NotLoadableError, UsageError
from dcp.exporting.casts import output_dtype
from dcp.exporting.nesting import IntegerKeys, dropped, integer_keys, left_gaps, nest, restored
from dcp.exporting.pump import Pump
from dcp.exporting.selection import Selected
from dcp.exporting.state import Storage, StorageRef, TensorSpec, TorchState, build_state
from dcp.exporting.tensor_stream import OutTensor, Progress, TensorStream
from dcp.exporting.torch_file import TorchFileWriter
from dcp.findings import Finding, finding
from dcp.index import CheckpointIndex, ObjectEntry, TensorEntry
from dcp.pickles.nodes import Value
from dcp.pickles.reader import read
from dcp.pickles.scan import Verdict, beyond_weights_only, judge, scan
from dcp.pickles.tensors import storage_of
from dcp.pickles.writer import write
from dcp.records import Records
from dcp.storage import Sink


@dataclass(frozen=True, slots=True)
class _Embedded:
    """A storage inside a pickled object, by its key there."""

    entry: ObjectEntry
    key: str


@dataclass
class TorchExport:
    """Everything decided before the first byte is written.

    Attributes:
        state: the pickle, and the storages that follow it.
        sources: where each storage's bytes come from.
        findings: what was left out, and why.
    """

    state: TorchState
    sources: Mapping[Storage, OutTensor | _Embedded]
    findings: list[Finding] = field(default_factory=list)

    @property
    def content(self) -> int:
        """Bytes of all storages."""
        return sum(storage.nbytes for _, storage in self.state.storages)


def prepare(
    checkpoint: Checkpoint,
    chosen: list[Selected],
    *,
    dtype: str | None = None,
    tied: Mapping[str, str] | None = None,
    allow_pickle: bool,
) -> TorchExport:
    """Read the objects, judge them, and lay out the file.

    Args:
        checkpoint: where they are.
        chosen: what goes out, and under which path.
        dtype: what floating tensors are cast to.
        tied: keys of tensors that get the storage of another one, with that one's key.
        allow_pickle: keep objects of classes that ``torch.load`` refuses by default.

    Raises:
        NotLoadableError: an object's record is damaged.
        UsageError: all that was chosen must be left out.
        StorageError: the store failed.
    """
    records = Records(checkpoint.store, checkpoint.objects)
    sources: dict[Storage, OutTensor | _Embedded] = {}
    storages: dict[str, Storage] = {}
    findings: list[Finding] = []
    values: list[tuple[Selected, Value]] = []
    archives = _read_objects(records, [c.entry for c in chosen if isinstance(c.entry, ObjectEntry)])
    known = _integer_keys(checkpoint.index, chosen, archives, records)
    for item in (restored(checkpoint.index, each, known) for each in chosen):
        entry = item.entry
        if isinstance(entry, TensorEntry):
            tensor = OutTensor(entry, item.key, output_dtype(entry.dtype, dtype))
            shared = storages[tied[entry.key]] if tied and entry.key in tied else None
            spec = TensorSpec.contiguous(tensor.dtype, entry.shape, shared)
            storages[entry.key] = spec.storage
            if shared is None:
                sources[spec.storage] = tensor
            values.append((item, spec))
            continue
        archive = archives[entry.key]
        refused = _refusal(entry, archive.pickle, allow_pickle)
        if refused is not None:
            findings.append(refused)
            continue
        values.append((item, _embed(entry, archive, sources)))
    if findings and not values:
        raise UsageError(f"nothing is left to write: {findings[0].message}")
    findings += dropped(checkpoint.index, chosen)
    findings += left_gaps(checkpoint.index, chosen)
    return TorchExport(build_state(nest(values)), sources, findings)


def _integer_keys(
    index: CheckpointIndex, chosen: list[Selected], archives: Mapping[str, Archive], records: Records
) -> IntegerKeys:
    def value_of(entry: ObjectEntry) -> Value:
        """A value that only tells of others: where it is damaged and not asked for, nothing is known."""
        try:
            return (archives.get(entry.key) or records.read_object(entry)).value
        except CheckpointError:
            return None

    return integer_keys(index, chosen, value_of)


def _read_objects(records: Records, entries: list[ObjectEntry]) -> dict[str, Archive]:
    """All objects' archives, several at once: there are many and they are small."""

    def one(entry: ObjectEntry) -> Archive:
        return records.read_object(entry)

    with ThreadPoolExecutor(8, thread_name_prefix="objects") as pool:
        futures = {entry.key: pool.submit(one, entry) for entry in entries}
    found: dict[str, Archive] = {}
    faults: list[Finding] = []
    for key, future in futures.items():
        try:
            found[key] = future.result()
        except CheckpointError as error:
            faults.append(error.as_finding())
    if faults:
        raise NotLoadableError(f"{len(faults)} objects cannot be read, first: {faults[0].message}", faults)
    return found


def _refusal(entry: ObjectEntry, pickle: bytes, allow_pickle: bool) -> Finding | None:
    """Why an object is left out: ``torch.load`` would refuse the whole file for it, harmless or not."""
    found = scan(pickle)
    judgement = judge(found)
    strange = beyond_weights_only(found)
    if found.strange and judgement.verdict is Verdict.ALLOWED:
        # It is written anew, at protocol 2, which has other opcodes.
        strange = beyond_weights_only(scan(write(read(pickle))))
    if judgement.verdict is Verdict.ALLOWED and (allow_pickle or not strange):
        return None
    if judgement.error is not None and judgement.verdict is not Verdict.REACHES_CODE:
        raise NotLoadableError(
            f"{entry.key}: {judgement.error}",
            [
                finding(
                    "records.undecodable",
                    f"{entry.key}: its pickle cannot be read: {judgement.error}",
                    key=entry.key,
                    file=entry.record.path if entry.record else None,
                )
            ],
        )
    if allow_pickle and judgement.error is None:
        return None
    asked = [*judgement.reaching, *judgement.unknown] or strange
    what = f"it asks for {', '.join(asked[:5])}" if asked else str(judgement.error)
    return finding(
        "export.unsafe-object",
        f"{entry.key} is left out: {what}"
        + (", which torch.load takes only with weights_only=False" if strange == asked else ""),
        key=entry.key,
        file=entry.record.path if entry.record else None,
        globals=asked,
        verdict=str(judgement.verdict),
    )


def _embed(entry: ObjectEntry, archive: Archive, sources: dict[Storage, OutTensor | _Embedded]) -> Value:
    """The object's value, its storages made the output's own."""
    moved: dict[str, Storage] = {}

    def persistent(pid: Value) -> Value:
        node = storage_of(pid)
        if node.key not in moved:
            moved[node.key] = Storage(node.nbytes)
            sources[moved[node.key]] = _Embedded(entry, node.key)
        return StorageRef(moved[node.key], node.dtype)

    return read(archive.pickle, persistent=persistent)


class Stream:
    """Writes a prepared export.

    Attributes:
        tensors: what has been written, with digests.
    """

    def __init__(
        self, checkpoint: Checkpoint, export: TorchExport, *, band_bytes: int, threads: int, archive_name: str
    ) -> None:
        self.export = export
        self.records = Records(checkpoint.store, checkpoint.objects)
        self.pump = Pump(self.records, band_bytes=band_bytes, threads=threads)
        self.archive_name = archive_name
        sources = (export.sources[storage] for _, storage in export.state.storages)
        self._stream = TensorStream(self.pump, (s for s in sources if isinstance(s, OutTensor)))
        self.tensors = self._stream.tensors

    def write(self, sink: Sink, progress: Progress | None = None) -> None:
        """Write the whole file to ``sink``."""
        export = self.export
        total = export.content
        writer = TorchFileWriter(
            sink, export.state.pickle, export.state.sizes, archive_name=self.archive_name
        )
        done = 0
        for key, storage in export.state.storages:
            source = export.sources[storage]
            if isinstance(source, _Embedded):
                data = self.records.read_object(source.entry).storage(source.key)
                if len(data) != storage.nbytes:
                    raise CheckpointError(
                        f"{source.entry.key}: a storage has {len(data)} bytes, not {storage.nbytes}",
                        code="records.mismatch",
                        key=source.entry.key,
                    )
                writer.write_storage(key, data)
                done += storage.nbytes
                continue
            for view, crc32 in self._stream.pieces(source):
                writer.write_storage(key, view, crc32)
                done += len(view)
                if progress is not None:
                    progress(done, total)
        self._stream.finish()
        writer.finish()


def require_savable(chosen: Iterable[Selected]) -> None:
    """Refuse dtypes that torch itself cannot pickle, before anything is read."""
    from dcp.pickles.tensors import TYPED_STORAGES, UNTYPED_DTYPES

    for item in chosen:
        entry = item.entry
        if isinstance(entry, TensorEntry) and entry.dtype not in TYPED_STORAGES | dict.fromkeys(
            UNTYPED_DTYPES
        ):
            raise UsageError(
                f"{entry.key} is {entry.dtype}, which torch.save cannot write; --exclude '{entry.key}'"
            )


def content_bytes(chosen: Iterable[Selected]) -> int:
    """Bytes of the output as far as the index tells: tensors in memory, objects as they are stored."""
    total = 0
    for item in chosen:
        entry = item.entry
        if isinstance(entry, TensorEntry):
            total += entry.nbytes
        elif entry.record is not None:
            total += entry.record.length
    return total


def largest_decoded(chosen: Iterable[Selected]) -> int:
    """Bytes of the largest set of chunks of one tensor that must be decoded whole."""
    sizes = [
        sum(c.box.volume for c in item.entry.chunks if c.record is not None and c.record.transforms)
        * ITEMSIZE[item.entry.dtype]
        for item in chosen
        if isinstance(item.entry, TensorEntry) and _may_be_encoded(item.entry)
    ]
    return max(sizes, default=0)


def _may_be_encoded(entry: TensorEntry) -> bool:
    records = entry.chunks.records
    return not isinstance(records, RecordColumns) or records.transformed()
