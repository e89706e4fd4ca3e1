"""Contracts: the keys, shapes and dtypes that loading code expects.

A `Contract` is JSON with a version. It comes from a checkpoint known to be good (`contract_of`,
`contract_at`) or from a model (`dcp.model_contract`), and a checkpoint is held against it by
`dcp.checks.keys`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from dcp.checkpoint import Kind, Survey, open_checkpoint
from dcp.errors import UsageError
from dcp.index import CheckpointIndex, Entry, TensorEntry
from dcp.storage import open_parent

LIMIT = 1 << 30
"""Largest contract file read, in bytes."""


class Expected(BaseModel):
    """What one key should hold. Shape in elements; shape and dtype only for tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["tensor", "bytes"]
    shape: tuple[int, ...] | None = None
    dtype: str | None = None

    def facts(self) -> dict[str, object]:
        """The fields that say something, as JSON values."""
        return self.model_dump(mode="json", exclude_none=True)


class Contract(BaseModel):
    """Expected keys. ``source`` says where they were taken from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    source: str | None = None
    keys: dict[str, Expected]


def contract_of(index: CheckpointIndex, source: str | None = None) -> Contract:
    """The contract that ``index`` fulfils."""
    return Contract(source=source, keys={key: _expected(entry) for key, entry in index.entries.items()})


def contract_at(found: Survey) -> Contract:
    """The contract that a checkpoint fulfils, or a step of several parts, whose keys begin with the part.

    Raises:
        MetadataError, NotLoadableError, StorageError: as `open_checkpoint`.
    """
    url = found.store.url
    if found.kind is not Kind.PARTS:
        return contract_of(open_checkpoint(found).index, source=url)
    keys = {
        f"{part}/{key}": value
        for part in found.parts
        for key, value in contract_of(open_checkpoint(found.part(part)).index).keys.items()
    }
    return Contract(source=url, keys=keys)


def _expected(entry: Entry) -> Expected:
    if isinstance(entry, TensorEntry):
        return Expected(kind="tensor", shape=entry.shape, dtype=entry.dtype)
    return Expected(kind="bytes")


def read_contract(location: str) -> Contract:
    """Read a contract file from a path or URL.

    Raises:
        UsageError: it is not a contract; the message names the first wrong field.
        StorageError: it cannot be read.
    """
    store, name = open_parent(location)
    try:
        return Contract.model_validate_json(store.read(name, LIMIT))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "document"
        raise UsageError(
            f"{location} is not a contract: {field}: {first['msg']}; write one with: ckpt contract URL"
        ) from None
