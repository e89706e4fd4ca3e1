"""From the values that the machine leaves, whose fields may hold anything, to a typed `CheckpointIndex`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dcp.boxes import Box, Shape
from dcp.dtypes import ITEMSIZE
from dcp.errors import MetadataError
from dcp.index import CheckpointIndex, Chunks, Entry, ObjectEntry, PathPart, TensorEntry
from dcp.record import Record
from dcp.wire import values
from dcp.wire.machine import INTEGERS, MAX_DIMS
from dcp.wire.reader import Loaded
from dcp.wire.runs import Run
from dcp.wire.values import Instance, Token, WireChunk, WireIndex, WireRecord

if TYPE_CHECKING:
    from dcp.columns import BoxColumns
    from dcp.wire.storage import StorageColumns

_MANY = 64
"""From this many chunks on a tensor's are kept in columns."""

_LEAST_BYTES = 16
"""No pickler writes a chunk in fewer bytes than this."""

_FIELDS = frozenset(
    {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}
    # Megatron's own, beside torch's.
    | {"all_local_plans", "mcore_data"}
)


class Parser:
    """Builds one index; every surprise is a `MetadataError`."""

    def __init__(self, loaded: Loaded, file: str) -> None:
        self.loaded = loaded
        self.file = file
        self.columns: StorageColumns | None = None
        self.records: dict[str, dict[Shape | None, Record]] = {}
        self.left_over: set[str] = set()
        """Keys with records that belong to none of their chunks."""

    def fail(self, what: str, key: str | None = None) -> MetadataError:
        where = f" (key {key!r})" if key is not None else ""
        return MetadataError(
            f"{self.file} is malformed: {what}{where}", code="metadata.unreadable", key=key, file=self.file
        )

    def index(self) -> CheckpointIndex:
        """The index.

        Raises:
            MetadataError: ``metadata.unreadable`` or ``metadata.unsupported``.
        """
        fields = self.loaded.metadata.fields
        described = fields.get("state_dict_metadata")
        if type(described) is not dict:
            raise self.fail("state_dict_metadata is not a dict")
        self._read_storage(fields.get("storage_data"))
        entries: dict[str, Entry] = {}
        for key, value in described.items():
            if type(key) is not str:
                raise self.fail(f"a key is {type(key).__name__}, not str")
            entries[key] = self._entry(key, value)
        meta = fields.get("storage_meta")
        meta_fields: dict[str, Any] = {}
        if type(meta) is Instance and meta.known is values.STORAGE_META:
            meta_fields = meta.fields
        stored: Iterable[str] = self.records if self.columns is None else self.columns
        return CheckpointIndex(
            entries=entries,
            paths=self._paths(fields.get("planner_data")),
            version=_text(fields.get("version")),
            framework_plans="all_local_plans" in fields,
            unknown_fields=tuple(sorted(fields.keys() - _FIELDS)),
            unreferenced=tuple(key for key in stored if key not in entries or key in self.left_over),
            checkpoint_id=_text(meta_fields.get("checkpoint_id")),
            save_id=_text(meta_fields.get("save_id")),
        )

    def _read_storage(self, storage: object) -> None:
        if type(storage) is not dict:
            raise self.fail("storage_data is not a dict of byte ranges")
        entries: Iterable[tuple[object, object]] = storage.items()
        if any(type(key) is Run for key in storage):
            from dcp.wire.storage import gather, one_by_one

            self.columns = gather(storage, self.loaded.names)
            if self.columns is not None:
                return
            entries = one_by_one(storage, self.loaded.names)
        for place, record in entries:
            if type(place) is not WireIndex or type(record) is not WireRecord:
                raise self._unknown_plugin(place, record)
            if place.fqn is None or record.path is None:
                raise self.fail("a storage entry without fields")
            of_key = self.records.setdefault(place.fqn, {})
            if place.offset in of_key:
                raise self.fail(f"two storage entries for the chunk at {place.offset}", place.fqn)
            of_key[place.offset] = Record(record.path, record.offset, record.length, record.transforms)

    def _unknown_plugin(self, place: object, record: object) -> MetadataError:
        return MetadataError(
            f"{self.file} was written by a storage plugin this reader does not know "
            f"({type(place).__name__} -> {type(record).__name__})",
            code="metadata.unsupported",
            file=self.file,
        )

    def _records_of(self, key: str) -> Mapping[Shape | None, Record]:
        return self.records.get(key, {}) if self.columns is None else self.columns.of(key)

    def _shape(self, value: object, key: str, what: str) -> Shape:
        if not isinstance(value, list | tuple) or not INTEGERS.issuperset(map(type, value[:MAX_DIMS])):
            raise self.fail(f"{what} is not a tuple of integers", key)
        if len(value) > MAX_DIMS:
            raise self.fail(f"{what} has more than {MAX_DIMS} dimensions", key)
        return tuple(value)

    def _entry(self, key: str, value: object) -> Entry:
        known = value.known if type(value) is Instance else None
        if known is values.BYTES:
            records = self._records_of(key)
            if records.keys() != {None}:
                self.left_over.add(key)
            return ObjectEntry(key, records.get(None))
        if type(value) is not Instance or known is not values.TENSOR:
            raise self.fail(f"an entry is {type(value).__name__}", key)
        fields = value.fields
        shape = self._shape(fields.get("size"), key, "the size")
        if any(n < 0 for n in shape):
            raise self.fail(f"negative size {shape}", key)
        chunks = fields.get("chunks")
        if not isinstance(chunks, list | tuple):
            raise self.fail("chunks are not a list", key)
        return TensorEntry(key, self._dtype(fields.get("properties"), key), shape, self._chunks(key, chunks))

    def _chunks(self, key: str, chunks: list[Any] | tuple[Any, ...]) -> Chunks:
        """A tensor's chunks and their records, as columns where there are many."""
        skipped = [chunk for chunk in chunks if type(chunk) is Run]
        count = len(chunks) - len(skipped) + sum(map(len, skipped))
        # Tensors may share a list of chunks, but not so often that the index outgrows its file.
        self.loaded.machine.spend(_LEAST_BYTES * 4 * count)
        if count >= _MANY and (skipped or self.columns is not None):
            boxes = self._box_columns(chunks)
            if boxes is not None:
                return self._joined(key, boxes)
        return self._plain_chunks(key, self._boxes(key, chunks, bool(skipped)))

    def _box_columns(self, chunks: list[Any] | tuple[Any, ...]) -> BoxColumns | None:
        from dcp.wire.storage import boxes_of

        if any(type(c) is not Run and (type(c) is not WireChunk or c.offsets is None) for c in chunks):
            return None
        return boxes_of(list(chunks))

    def _joined(self, key: str, boxes: BoxColumns) -> Chunks:
        if self.columns is None:
            return self._plain_chunks(key, tuple(boxes))
        records, left_over = self.columns.join(key, boxes)
        if left_over:
            self.left_over.add(key)
        return Chunks(boxes, records)

    def _boxes(self, key: str, chunks: list[Any] | tuple[Any, ...], skipped: bool) -> tuple[Box, ...]:
        made: list[Any] = []
        if skipped:
            from dcp.wire.storage import boxes_one_by_one

            made = list(boxes_one_by_one(list(chunks)))
        else:
            made = [
                Box(c.offsets, c.sizes) if type(c) is WireChunk and c.offsets is not None else c
                for c in chunks
            ]
        for box in made:
            if type(box) is WireChunk:
                raise self.fail("a chunk without offsets or sizes", key)
            if type(box) is not Box:
                raise self.fail("something in the list of chunks is none", key)
        return tuple(made)

    def _plain_chunks(self, key: str, boxes: tuple[Box, ...]) -> Chunks:
        records = self._records_of(key)
        if not records.keys() <= {box.offsets for box in boxes}:
            self.left_over.add(key)
        return Chunks(boxes, tuple([records.get(box.offsets) for box in boxes]))

    def _dtype(self, properties: object, key: str) -> str:
        if type(properties) is Instance and properties.known is values.PROPERTIES:
            state: Any = properties.fields.get("state")
            dtype = properties.fields.get("dtype")
            if type(state) is tuple:
                dtype, memory_format = (state[0], state[3]) if len(state) == 5 else (None, None)
                if type(memory_format) is not Token or memory_format not in values.MEMORY_FORMATS:
                    raise self.fail("its properties are not those of a tensor", key)
            if isinstance(dtype, Token) and dtype in ITEMSIZE:
                return str(dtype)
        raise self.fail("no dtype", key)

    def _paths(self, planner_data: object) -> dict[str, tuple[PathPart, ...]] | None:
        if type(planner_data) is not dict or not planner_data:
            return None
        paths: dict[str, tuple[PathPart, ...]] = {}
        for key, path in planner_data.items():
            if type(key) is not str or type(path) is not tuple or not path:
                raise self.fail("planner_data is not a map from keys to paths")
            self.loaded.machine.spend(len(path))
            if not all(type(part) in (str, int) for part in path):
                raise self.fail("a path holds something other than str and int", key)
            paths[key] = path
        return paths


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
