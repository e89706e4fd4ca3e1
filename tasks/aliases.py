"""Aliases: names such as ``latest`` that lead to a published step, as an append-only sequence.

``<run>/aliases/<alias>/<NNNNNNNN>.json`` is created only if absent, and the highest number wins, so that
history stays readable and two writers cannot lose each other's move. `advance` moves an alias forward by
itself and never back: a late older step does not take it. `set_alias` moves it anywhere, for people.
"""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from dcp.errors import EnvironmentFault, NotFoundError, UsageError
from dcp.storage import Store, open_store
from tasks.ledger import StepKey, create_once, timestamp
from tasks.manifest import MANIFEST, Manifest, none_here, published_directory, read_manifest

DIRECTORY = "aliases"
LATEST = "latest"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
_NUMBER = re.compile(r"(\d{8})\.json", re.ASCII)
_LIMIT = 1 << 20


class AliasRecord(BaseModel):
    """One move of an alias. ``manifest`` is relative to the run's directory; ``when`` is UTC in ISO 8601."""

    model_config = ConfigDict(frozen=True)

    schema_version: Literal[1] = 1
    alias: str
    number: int
    """Position in the sequence, from 1."""
    run: str
    step: str
    step_number: int
    fingerprint: str
    manifest: str
    highest: int
    """The highest step number that the alias has ever led to,"""
    highest_fingerprint: str
    """and the bytes it led to then."""
    reason: Literal["published", "set"]
    when: str
    who: str


def current_alias(run_store: Store, alias: str = LATEST) -> AliasRecord | None:
    """Where an alias leads now; None if it was never set.

    Raises:
        EnvironmentFault: its newest record is damaged.
        StorageError: it cannot be read.
    """
    store = run_store.child(f"{DIRECTORY}/{alias}")
    try:
        names = [info.name for info in store.objects()]
    except NotFoundError:
        return None
    numbered = [name for name in names if _NUMBER.fullmatch(name)]
    if not numbered:
        return None
    newest = max(numbered)
    try:
        return AliasRecord.model_validate_json(store.read(newest, _LIMIT))
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        raise EnvironmentFault(f"{store.url}/{newest} is no alias record ({reason})") from None


def aliases(run_store: Store) -> dict[str, AliasRecord]:
    """Every alias of a run and where it leads."""
    try:
        names = run_store.child(DIRECTORY).directories()
    except NotFoundError:
        return {}
    found = {name: current_alias(run_store, name) for name in names if _NAME.fullmatch(name)}
    return {name: record for name, record in found.items() if record is not None}


def advance(run_store: Store, manifest: Manifest, alias: str = LATEST) -> AliasRecord:
    """Lead ``alias`` to a newly published step, and return where it leads then.

    It stays where it is if it has been at a later step, or at these bytes, before: whoever moved it since had
    reasons. A re-saved step takes the place of its older self.
    """

    def keep(now: AliasRecord) -> bool:
        return now.highest > manifest.number or (
            now.highest == manifest.number and now.highest_fingerprint == manifest.fingerprint
        )

    return _append(run_store, alias, manifest, "published", keep=keep)


def set_alias(
    publish_root: str, run: str, step: str, fingerprint: str, *, alias: str = LATEST, **options: Any
) -> AliasRecord:
    """Lead an alias to a published step, also back to an older one.

    Args:
        publish_root: as in the settings.
        run: the run's name.
        step: name of the step's directory.
        fingerprint: of the published bytes, in full or its first 8 digits.
        alias: its name.
        options: fsspec options of the publish root.

    Raises:
        UsageError: the name cannot be an alias, or the step is not published.
        StorageError: storage failed.
    """
    if not _NAME.fullmatch(alias):
        raise UsageError(f"{alias!r} cannot be an alias; use letters, digits, '.', '_' and '-'")
    run_store = open_store(publish_root, **options).child(run)
    directory = published_directory(StepKey(step, fingerprint))
    published = run_store.child(directory)
    manifest = read_manifest(published)
    if manifest is None:
        raise UsageError(f"{published.url} is not published: {none_here(published)}")
    return _append(run_store, alias, manifest, "set")


def _append(
    run_store: Store,
    alias: str,
    manifest: Manifest,
    reason: Literal["published", "set"],
    *,
    keep: Callable[[AliasRecord], bool] | None = None,
) -> AliasRecord:
    """Append a move, again from the start whenever somebody else appended in between."""
    while True:
        now = current_alias(run_store, alias)
        if now is not None:
            here = (now.step, now.fingerprint) == (manifest.step, manifest.fingerprint)
            if here or (keep is not None and keep(now)):
                return now
        leads = now is None or manifest.number >= now.highest
        record = AliasRecord(
            alias=alias,
            number=now.number + 1 if now else 1,
            run=manifest.run,
            step=manifest.step,
            step_number=manifest.number,
            fingerprint=manifest.fingerprint,
            manifest=f"{published_directory(StepKey(manifest.step, manifest.fingerprint))}/{MANIFEST}",
            highest=manifest.number if now is None or leads else now.highest,
            highest_fingerprint=manifest.fingerprint if now is None or leads else now.highest_fingerprint,
            reason=reason,
            when=timestamp(time.time()),
            who=f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:12]}",
        )
        name = f"{DIRECTORY}/{alias}/{record.number:08d}.json"
        if create_once(run_store, name, record.model_dump_json(indent=1).encode()):
            return record
