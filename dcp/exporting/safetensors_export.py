"""Exporting to safetensors: one file, or a directory of shards whose index is written last.

A byte passes index → bands → pump → sink once. What is complete is opened again and held against its header
and the ends of its tensors; who wants all of it read again has `dcp.exporting.certificate`. A store that can
keep finished files back shows all shards together; any other shows them one by one, and until the index
stands they are nobody's. A failure leaves none of them. What becomes of an older export in the directory is
told in `dcp.exporting.standing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from dcp.checkpoint import Checkpoint
from dcp.errors import EnvironmentFault, UsageError
from dcp.exporting.casts import output_dtype
from dcp.exporting.pump import Pump
from dcp.exporting.report import ExportedFile, ExportedTensor
from dcp.exporting.safetensors_layout import INDEX, SUFFIX, WHOLE, Shard, holds, index_of, split
from dcp.exporting.selection import Selected
from dcp.exporting.sink import ChecksumSink
from dcp.exporting.standing import clear, clear_replaced, withdraw
from dcp.exporting.tensor_stream import OutTensor, Progress, TensorStream, content_of
from dcp.findings import Finding, finding
from dcp.index import TensorEntry
from dcp.records import Records
from dcp.safetensors_file import Stored, read_header
from dcp.storage import Store

_MOST_OPEN = 200
"""Most files that are kept back at once: each is an open one."""
_END = 64
"""Bytes at either end of a tensor that are looked at again in the finished file."""
_THREADS = 8


def lay_out(
    checkpoint: Checkpoint,
    chosen: Iterable[Selected],
    *,
    name: str,
    max_shard_size: int,
    dtype: str | None = None,
    tied: Mapping[str, str] | None = None,
) -> tuple[list[Shard], list[Finding]]:
    """What goes into which file, and what safetensors cannot hold.

    Raises:
        UsageError: no tensor is left, or see `split`.
    """
    tensors: list[OutTensor] = []
    left_out: list[Finding] = []
    for item in chosen:
        entry = item.entry
        kept = (tied or {}).get(entry.key)
        facts: dict[str, object] = {}
        if not isinstance(entry, TensorEntry):
            why = "it is not a tensor, which is all that safetensors hold"
        elif not holds(goes_out := output_dtype(entry.dtype, dtype)):
            why, facts = f"it is {goes_out}, which safetensors cannot hold", {"tensor": True}
        elif kept is not None:
            why, facts = f"it equals {kept}, which is there", {"tied_to": kept}
        else:
            tensors.append(OutTensor(entry, item.key, goes_out))
            continue
        left_out.append(
            finding(
                "export.skipped-object",
                f"{entry.key} is left out: {why}",
                key=entry.key,
                severity="info" if "tied_to" in facts else None,
                facts=facts,
            )
        )
    if not tensors:
        raise UsageError("none of the selected keys is a tensor that safetensors can hold")
    shards = split(tensors, name=name, max_shard_size=max_shard_size, metadata=metadata_of(checkpoint))
    return shards, left_out


def metadata_of(checkpoint: Checkpoint) -> dict[str, str]:
    """What headers and index say of where the tensors come from."""
    return {"format": "pt", "source": checkpoint.url, "fingerprint": checkpoint.fingerprint}


class SafetensorsExport:
    """Writes the shards of one export.

    Attributes:
        files: what has been written.
        tensors: what has been written, with digests.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        shards: Sequence[Shard],
        *,
        band_bytes: int,
        threads: int,
        sink_type: type[ChecksumSink],
    ) -> None:
        self.shards = shards
        self.files: list[ExportedFile] = []
        self.pump = Pump(
            Records(checkpoint.store, checkpoint.objects), band_bytes=band_bytes, threads=threads
        )
        self._stream = TensorStream(self.pump, (tensor for shard in shards for tensor in shard.tensors))
        self._order = [tensor for shard in shards for tensor in shard.tensors]
        self._metadata = metadata_of(checkpoint)
        self._sink_type = sink_type
        self._ends: dict[str, tuple[bytes, bytes]] = {}
        self._visible: list[str] = []
        self._named: frozenset[str] = frozenset()
        self._done = 0

    @property
    def tensors(self) -> dict[str, ExportedTensor]:
        return self._stream.tensors

    def write(self, store: Store, *, finished: Callable[[], None], progress: Progress | None = None) -> None:
        """Write everything.

        Args:
            store: that of the names in the shards.
            finished: called when all has been read, or more often; what it raises undoes the export.
            progress: told about bytes.
        """
        directory = self.shards[0].name.rpartition("/")[0]
        if not directory:
            self._write_shards(store, finished, progress)
            return
        require_directory(store, directory)
        inside = store.child(directory)
        with store.claimed(directory) as held:
            standing = clear(inside)
            self.shards = standing.named_apart(self.shards, self._metadata)
            self._named = standing.named
            self._write_shards(store, finished, progress)
            try:
                held()
                self._emit(store, f"{directory}/{INDEX}", index_of(self.shards, self._metadata))
            except BaseException:
                withdraw(store, self._visible)
                raise
            clear_replaced(inside, self.shards)

    def write_alone(self, store: Store, *, finished: Callable[[], None]) -> None:
        """Write the shards and no index, which is left to whoever has claimed the directory."""
        self._write_shards(store, finished, None)

    def _write_shards(self, store: Store, finished: Callable[[], None], progress: Progress | None) -> None:
        """All shards, each opened again; none of them if anything fails."""
        try:
            if store.holds_writers and len(self.shards) <= _MOST_OPEN:
                self._write_together(store, finished, progress)
            else:
                self._write_one_by_one(store, finished, progress)
            for shard in self.shards:
                self._check(store, shard)
        except BaseException:
            withdraw(store, self._visible)
            raise

    def _write_together(self, store: Store, finished: Callable[[], None], progress: Progress | None) -> None:
        with ExitStack() as kept_back:
            for shard in self.shards:
                with self._sink_type(kept_back.enter_context(store.writer(shard.name))) as sink:
                    self._fill(shard, sink, progress)
                self._note(shard.name, sink)
            self._stream.finish()
            finished()
            self._visible += [shard.name for shard in self.shards]

    def _write_one_by_one(
        self, store: Store, finished: Callable[[], None], progress: Progress | None
    ) -> None:
        for number, shard in enumerate(self.shards, 1):
            with store.writer(shard.name) as target, self._sink_type(target) as sink:
                self._fill(shard, sink, progress)
                if number == len(self.shards):
                    self._stream.finish()
                    finished()
                elif shard.name.rpartition("/")[2] in self._named:
                    # It takes the place of its equal, which it is if it was read from the same checkpoint.
                    finished()
            self._visible.append(shard.name)
            self._note(shard.name, sink)

    def _fill(self, shard: Shard, sink: ChecksumSink, progress: Progress | None) -> None:
        total = content_of(self._order)
        sink.write(shard.header)
        for tensor in shard.tensors:
            first = last = b""
            for view, _ in self._stream.pieces(tensor):
                first, last = first or bytes(view[:_END]), bytes(view[-_END:])
                sink.write(view)
                self._done += len(view)
                if progress is not None:
                    progress(self._done, total)
            self._ends[tensor.name] = first, last

    def _emit(self, store: Store, name: str, data: bytes) -> None:
        with store.writer(name) as target, self._sink_type(target) as sink:
            sink.write(data)
        self._note(name, sink)

    def _note(self, name: str, sink: ChecksumSink) -> None:
        self.files.append(sink.written_as(name))

    def _check(self, store: Store, shard: Shard) -> None:
        """Open a finished file again: its size and header, and its checksum where the store keeps one.

        Of any other store both ends of every tensor are read: what went to a wrong place is found by them.
        """
        info = store.info(shard.name)
        stored, _ = read_header(store, info)
        written = next(file for file in self.files if file.name == shard.name)
        if (
            info.size != shard.size
            or stored != shard.stored()
            or info.crc32c not in (None, written.crc32c)
            or (info.crc32c is None and not self._ends_stand(store, shard.name, stored))
        ):
            raise EnvironmentFault(
                f"{store.url}/{shard.name} does not hold what was written to it; suspect the store or disk"
            )

    def _ends_stand(self, store: Store, name: str, stored: Mapping[str, Stored]) -> bool:
        """Whether every tensor begins and ends in the file as it was written."""

        def stands(key: str) -> bool:
            place, (first, last) = stored[key], self._ends[key]
            # Tensors without bytes have no ends.
            return not first or (
                store.read_range(name, place.start, place.start + len(first)) == first
                and store.read_range(name, place.end - len(last), place.end) == last
            )

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="check") as pool:
            return all(pool.map(stands, stored))


def require_directory(store: Store, directory: str) -> None:
    """Refuse a place where shards could not stand, or would not be what is loaded, with a `UsageError`."""
    if store.exists(directory):
        raise UsageError(
            f"{store.url}/{directory} is a file; safetensors output is a directory, or a file NAME{SUFFIX}"
        )
    if store.exists(f"{directory}/{WHOLE}"):
        raise UsageError(
            f"{store.url}/{directory}/{WHOLE} stands there, which loaders take before any shards; "
            f"remove it, or name another directory"
        )
