"""`BucketWriter`: a storage writer for ``torch.distributed.checkpoint.save`` on any store.

It takes the place of torch's `FileSystemWriter` and `FsspecWriter` and writes the same format. Data files
come first, each visible only when whole; `.metadata` comes last, in one request that creates it only if it
is absent. So a step is committed whole or not at all, whatever dies when, and a committed step is replaced
only on demand, after it was taken out of use.

Every save has names of its own for its data files: ``__RANK_NUMBER.distcp`` as torch has it, with numbers
that begin at one drawn for the save. A rank of an earlier attempt that is still alive, or another job that
saves into the same place, can therefore not change a file that this save's index refers to. What earlier
saves left is removed once this one is committed.
"""

from __future__ import annotations

import dataclasses
import pickle
import re
import threading
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from os import PathLike
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp.errors import AlreadyExistsError, NotFoundError, StorageError, UsageError
from dcp.save.files import pickled, split, write_file
from dcp.storage import Store, normalise_url, open_store, require_options, require_protocol

METADATA = ".metadata"
FORMAT_VERSION = "1.0.0"
"""What torch 2.13 says of the format in `.metadata`."""
REMOTE_FILES = 32
"""Most files of a rank on a store other than local disk, where one that goes up in one request is fastest."""
THREADS = 4
"""Files of a rank that are written at a time."""

_INDEX = re.compile(r"(?:__(?P<rank>\d+))?\.metadata")
_DATA = re.compile(r"__(?P<rank>\d+)_\d+\.distcp")
_MARK = 8
"""Hexadecimal digits of a save's id that its files' numbers begin with."""
_NUMBERS = 100_000
"""Most files of a rank; so many numbers belong to a save."""


class BucketWriter(BlockingAsyncStager, StorageWriter):
    """Writes a checkpoint to a local path or an fsspec URL (``gs://``, ``s3://``, ``memory://``).

    It serves ``save`` and ``async_save``, with and without a process group. Data files left behind by an
    attempt that did not come to its end are removed by the next one that does.
    """

    def __init__(
        self,
        url: str | PathLike[str],
        overwrite: bool = False,
        *,
        files_per_rank: int | None = None,
        cache_staged_state_dict: bool = False,
        **options: Any,
    ) -> None:
        """
        Args:
            url: where the checkpoint shall be; nothing is created yet.
            overwrite: replace a committed step: its index is removed before any data is written, its data
                once the new index is there. Until then there must be room for both. An object that cannot be
                pickled is found before that where one process saves, and where the planner is a
                `CheckedSavePlanner`.
            files_per_rank: most files a rank writes, four at a time; 1 on local disk and 32 elsewhere if not
                given. On a bucket each that is being written holds up to 80 MiB in memory.
            cache_staged_state_dict: keep the copy that ``async_save`` makes, for the next one. torch keeps
                it in pinned memory, so this needs an accelerator: on a machine without one ``async_save``
                fails.
            options: passed to the fsspec filesystem; local paths have none.

        Raises:
            UsageError: the URL, the number of files or an option is not possible.
        """
        super().__init__(cache_staged_state_dict=cache_staged_state_dict)
        if files_per_rank is not None and not 1 <= files_per_rank <= _NUMBERS:
            raise UsageError(f"files_per_rank is {files_per_rank}; a rank writes 1 to {_NUMBERS} files")
        self.url = normalise_url(url)
        require_protocol(self.url)
        require_options(self.url, options, BucketWriter)
        self.overwrite = overwrite
        self.files_per_rank = files_per_rank or (REMOTE_FILES if "://" in self.url else 1)
        self._options = options
        self._rank_alone: int | None = None
        self._committed: tuple[str, ...] = ()
        self._stale: tuple[str, ...] = ()
        self._is_new = False
        self.save_id = uuid.uuid4().hex

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's URL, as torch's loggers ask for it."""
        return self.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether there is a filesystem for it; nothing is read or written."""
        try:
            open_store(str(checkpoint_id))
        except UsageError:
            return False
        return True

    def reset(self, checkpoint_id: Any = None) -> None:
        """Begin a save of its own; to another place if one is given."""
        if checkpoint_id:
            self.url = normalise_url(str(checkpoint_id))
            require_protocol(self.url)
        self._committed = self._stale = ()
        self._is_new = False
        self.save_id = uuid.uuid4().hex

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.url, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """``use_collectives=False`` lets each rank write an index of its own, ``__RANK.metadata``."""
        alone = not kwargs.get("use_collectives", True)
        self._rank_alone = kwargs.get("rank") if alone else None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Runs on the coordinator before any rank is told to write: the moment to clear the place.

        Raises:
            AlreadyExistsError: a committed step is there and must not be replaced.
            StorageError: storage failed.
        """
        store = self._store()
        self._look(store)
        if len(plans) != 1:
            self._retire(store)
        first = self._rank_alone or 0
        return [dataclasses.replace(plan, storage_data=first + number) for number, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files.

        Raises:
            UsageError: an object cannot be pickled; where one process saves, the step that was to be replaced
                is still there.
            StorageError: storage failed; no file that is not whole can be seen.
        """
        store = self._store()
        if self._committed:
            for item in plan.items:
                if item.type == WriteItemType.BYTE_IO:
                    pickled(planner, item)
            self._retire(store)
        failed = threading.Event()

        def write(number: int, items: Sequence[Any]) -> list[WriteResult]:
            name = self.file_name(plan.storage_data, number)
            try:
                return write_file(store, name, items, planner, failed.is_set)
            except BaseException:
                failed.set()
                raise

        parts = split(plan.items, self.files_per_rank)
        with ThreadPoolExecutor(THREADS, thread_name_prefix="save") as pool:
            running = [pool.submit(write, number, items) for number, items in enumerate(parts)]
        errors = [error for future in running if (error := future.exception())]
        if errors:
            raise next((e for e in errors if not isinstance(e, InterruptedError)), errors[0])
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for future in running for result in future.result()])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: write the index, once every rank's files are there; then remove what earlier saves left.

        Raises:
            AlreadyExistsError: another save into the same place was committed meanwhile.
            StorageError: storage failed, or a data file is gone.
        """
        metadata.version = FORMAT_VERSION
        metadata.storage_data = {r.index: r.storage_data for part in results for r in part}
        metadata.storage_meta = self.storage_meta()
        content = pickle.dumps(metadata)
        store, name = self._store(), self._index_name()
        ends = _ends(results)
        self._require_data(store, ends)
        try:
            store.create(name, content)
        except AlreadyExistsError:
            # A request that was answered too late is repeated by the storage library and then meets itself.
            if store.info(name).size != len(content) or store.read(name, len(content)) != content:
                self.discard(ends)
                raise AlreadyExistsError(
                    f"another save into {self.url} was committed while this one was written; this one is "
                    "not, and changed nothing of the other: save again to another place",
                    self.url,
                ) from None
        try:
            self._remove(store, set(self._stale) - set(ends))
            store.sweep()
        except StorageError as error:
            warnings.warn(
                f"{self.url} is committed, but files of earlier saves are left: {error}", stacklevel=2
            )

    def file_name(self, rank: int, number: int) -> str:
        """Name of a data file of this save."""
        return f"__{rank}_{int(self.save_id[:_MARK], 16) * _NUMBERS + number}.distcp"

    def discard(self, names: Iterable[str]) -> None:
        """Remove data files of this save, which will not be committed, as far as storage lets it."""
        with suppress(StorageError):
            store = self._store()
            self._remove(store, names)
            if self._is_new:
                store.prune()

    def _remove(self, store: Store, names: Iterable[str]) -> None:
        for name in sorted(names):
            store.remove(name)

    def _require_data(self, store: Store, ends: Mapping[str, int]) -> None:
        """Whoever replaces a step while this one is being written also removes this one's files."""
        sizes: dict[str, int] = {}
        with suppress(NotFoundError):
            sizes = {found.name: found.size for found in store.objects()}
        for name, end in ends.items():
            if sizes.get(name, -1) < end:
                raise NotFoundError(
                    f"{name} of {self.url} was written and is {'gone' if name not in sizes else 'too short'} "
                    "before the index could be: another save into the same place, or a clean-up, removed it; "
                    "nothing is committed",
                    f"{self.url}/{name}",
                )

    def _store(self) -> Store:
        # Opened where it is used: the writer may be sent to a process of its own by ``async_save``.
        return open_store(self.url, **self._options)

    def _index_name(self) -> str:
        return METADATA if self._rank_alone is None else f"__{self._rank_alone}{METADATA}"

    def _look(self, store: Store) -> None:
        """Note what is here, and refuse to replace what is committed unless that was asked for."""
        self._committed = self._stale = ()
        self._is_new = False
        try:
            names = [found.name for found in store.objects()]
        except NotFoundError:
            self._is_new = True
            return
        indexes = [name for name in names if self._is_replaced(_INDEX.fullmatch(name))]
        if indexes and not self.overwrite:
            raise AlreadyExistsError(
                f"there is a committed checkpoint at {self.url}; save to another place, or replace it with "
                "overwrite=True",
                self.url,
            )
        self._committed = tuple(indexes)
        self._stale = tuple(name for name in names if self._is_replaced(_DATA.fullmatch(name)))

    def _retire(self, store: Store) -> None:
        """Take what is to be replaced out of use before data is written, so that nothing torn looks whole.

        The data stays until this save is committed. Another one that is still running may have put it there,
        and would commit an index of files that are gone.
        """
        for name in self._committed:
            store.remove(name)
        self._committed = ()

    def _is_replaced(self, found: re.Match[str] | None) -> bool:
        """Whether an object is part of what this save replaces: ranks that save alone replace their own."""
        if found is None:
            return False
        rank = found["rank"]
        return self._rank_alone is None or rank is None or int(rank) == self._rank_alone


def _ends(results: Sequence[Sequence[WriteResult]]) -> dict[str, int]:
    """Least size in bytes of every data file."""
    ends: dict[str, int] = {}
    for result in (result for part in results for result in part):
        stored = result.storage_data
        ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
    return ends
