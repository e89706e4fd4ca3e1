"""The ledger: what was done to which bytes, as small objects that are created only if absent.

Under ``<publish root>/<run>/.ledger/`` stands ``<step>/<fingerprint>/<stage>.json`` for every finished
stage. A `StepKey` names the bytes (step and fingerprint), a `LedgerRecord` is one object. Nothing is ever
overwritten, so of two workers that finish the same stage one creates the record and the other learns
that it came second; a crash leaves either the whole record or none.

Stages: ``seen`` (which listing has this fingerprint), ``validated``, ``test-loaded``, ``exported``,
``published``; ``failed-N`` for the N-th failed attempt at any of them (a failed stage is not a done one);
``partial`` where what is published lacks some of the step's tensors (`tasks.partial`);
``after-due``, ``after-failed-N`` and ``after-done`` for what follows a publication (`tasks.after`);
``trashed-N``, ``restored-N``, ``deleting`` and ``retired`` for retention (`tasks.retire`); ``swept`` where
unpublished files of bytes that were saved over were removed (`tasks.leftovers`); ``alerted`` for the
first problem told to people and ``alerted-<problem>`` for others, each with ``.try-N`` and
``.outcome-N`` for its deliveries (`tasks.alert`). Under the step `RUN` stands what concerns the whole run.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dcp.errors import AlreadyExistsError, EnvironmentFault, NotFoundError, UnreachableError
from dcp.storage import ObjectInfo, Store, is_safe_name, open_store
from tasks.text import writable_facts

DIRECTORY = ".ledger"
UNKNOWN = ".unknown/"
"""Below it stand the names of directories that are no steps, each reported once."""
CONTRACT = "contract.json"
"""Beside a step's records: the keys it has, which the next step is held against."""

Stage = Literal["validate", "test-load", "export", "publish"]
"""What a step goes through, in this order; the record of a done one has its name in the past tense."""

DONE: dict[Stage, str] = {
    "validate": "validated",
    "test-load": "test-loaded",
    "export": "exported",
    "publish": "published",
}
"""The record that says a stage is done."""

RUN = ".run"
"""Takes the place of a step in keys of what concerns a whole run."""

RECORD_LIMIT = 256 << 20
"""Largest record read, in bytes. ``exported`` holds a digest a tensor; all others are far smaller."""

_ATTEMPTS = 3
_RECORD = re.compile(
    r"(?P<step>[^/]+)/(?P<fingerprint>[0-9a-f]{64})/"
    r"(?P<stage>(?:seen|validated|test-loaded|exported|published|failed-[1-9]\d{0,5}"
    r"|partial|after-due|after-done|after-failed-[1-9]\d{0,5}|(?:trashed|restored)-[1-9]\d{0,5}|deleting|retired|swept"
    r"|alerted(?:-[a-z][a-z-]*)?(?:\.(?:try|outcome)-\d{1,3})?))\.json",
    re.ASCII,
)


@dataclass(frozen=True, slots=True, order=True)
class StepKey:
    """Certain bytes of a certain step."""

    step: str
    """Name of the step's directory."""
    fingerprint: str
    """64 hexadecimal digits."""

    @property
    def short(self) -> str:
        """The fingerprint's first 8 digits, which name the published directory."""
        return self.fingerprint[:8]


class LedgerRecord(BaseModel):
    """One record. ``when`` is UTC in ISO 8601; ``who`` is host, process and a token of this very write."""

    model_config = ConfigDict(frozen=True)

    schema_version: Literal[1] = 1
    run: str
    step: str
    fingerprint: str
    stage: str
    when: str
    who: str
    facts: dict[str, Any] = Field(default_factory=dict)

    @property
    def key(self) -> StepKey:
        """The bytes that it is about."""
        return StepKey(self.step, self.fingerprint)

    @property
    def at(self) -> float:
        """``when`` in seconds since the epoch."""
        return datetime.fromisoformat(self.when).timestamp()


class Failure(BaseModel):
    """Why a stage failed; the facts of a ``failed-N`` record."""

    model_config = ConfigDict(frozen=True)

    stage: Stage
    problem: str
    """Under which problem people are told, see `tasks.alert`."""
    final: bool
    """The verdict holds for these bytes and would be the same again; otherwise the environment failed."""
    message: str
    error: str | None = None
    """Class of the exception, where one was raised."""
    basis: str = ""
    """Whose keys an operator had accepted when the keys were judged, see `tasks.acceptance`."""
    expected: str = ""
    """URL of the step that the keys were held against; empty where it was no step."""
    codes: dict[str, int] = Field(default_factory=dict)
    """Error findings counted by code."""
    errors: int = 0
    """Number of error findings."""
    examples: list[dict[str, Any]] = Field(default_factory=list)
    """The first error findings in full."""


def parse_name(name: str) -> tuple[StepKey, str] | None:
    """Key and stage of the record object ``name`` (relative to the ledger); None for any other object."""
    match = _RECORD.fullmatch(name)
    return (StepKey(match["step"], match["fingerprint"]), match["stage"]) if match else None


def preferred(keys: Iterable[StepKey], provisional: StepKey | None) -> StepKey | None:
    """Of keys seen with the same listing, the one whose index was read, if there is one.

    Args:
        keys: the candidates.
        provisional: the key that the step has as long as its index has not been read.
    """
    found = list(keys)
    return next((key for key in found if key != provisional), found[0] if found else None)


def failures(stages: Mapping[str, object] | frozenset[str]) -> list[str]:
    """The ``failed-N`` among stage names, by number."""
    return sorted((s for s in stages if s.startswith("failed-")), key=lambda s: int(s[len("failed-") :]))


def timestamp(now: float) -> str:
    """Seconds since the epoch as UTC in ISO 8601 with milliseconds."""
    return datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds")


class Ledger:
    """The ledger of one run. Safe for any number of writers anywhere."""

    def __init__(self, run_store: Store, run: str, *, clock: Callable[[], float] = time.time) -> None:
        self.run = run
        self.run_store = run_store
        self.store = run_store.child(DIRECTORY)
        self.clock = clock
        self.who = f"{socket.gethostname()}:{os.getpid()}"

    @classmethod
    def open(cls, publish_root: str, run: str, **options: Any) -> Ledger:
        """The ledger of ``run`` below ``publish_root``; nothing is read or created."""
        return cls(open_store(publish_root, **options).child(run), run)

    def create(self, key: StepKey, stage: str, facts: Mapping[str, Any] | None = None) -> bool:
        """Record that ``stage`` is done. False if the record existed: somebody else came first.

        Raises:
            StorageError: it could not be recorded.
        """
        return create_once(self.store, _name(key, stage), self.record(key, stage, facts or {}))

    def report_unknown(self, names: Iterable[str]) -> bool:
        """Record that these directories are no steps. False if somebody else reported exactly these."""
        listed = sorted(names)
        key = StepKey("", hashlib.sha256("\0".join(listed).encode("utf-8", "surrogateescape")).hexdigest())
        record = self.record(key, "unknown", {"names": listed})
        return create_once(self.store, f"{UNKNOWN}{key.fingerprint}.json", record)

    def record(self, key: StepKey, stage: str, facts: Mapping[str, Any]) -> bytes:
        """The bytes of a record; no two calls give the same."""
        record = LedgerRecord(
            run=self.run,
            step=key.step,
            fingerprint=key.fingerprint,
            stage=stage,
            when=timestamp(self.clock()),
            who=f"{self.who}:{uuid.uuid4().hex[:12]}",
            facts=writable_facts(dict(facts)),
        )
        return record.model_dump_json(indent=1).encode()

    def fail(self, key: StepKey, failure: Failure) -> int:
        """Record a failed attempt under the next free number, and return that number."""
        existing = failures(self.stages(key))
        number = int(existing[-1][len("failed-") :]) + 1 if existing else 1
        while not self.create(key, f"failed-{number}", failure.model_dump(mode="json")):
            number += 1
        return number

    def stages(self, key: StepKey) -> frozenset[str]:
        """Names of all records of ``key``, from one listing."""
        try:
            found = self.store.child(f"{key.step}/{key.fingerprint}").objects()
        except NotFoundError:
            return frozenset()
        parsed = (parse_name(f"{key.step}/{key.fingerprint}/{info.name}") for info in found)
        return frozenset(item[1] for item in parsed if item)

    def objects(self) -> list[ObjectInfo]:
        """One listing of the whole ledger; empty before its first record."""
        try:
            return self.store.objects()
        except NotFoundError:
            return []

    def keys(self, step: str) -> dict[StepKey, frozenset[str]]:
        """Every key under which ``step`` is known, with the names of its records, from one listing."""
        try:
            found = self.store.child(step).objects()
        except NotFoundError:
            return {}
        stages: dict[StepKey, set[str]] = {}
        for info in found:
            parsed = parse_name(f"{step}/{info.name}")
            if parsed:
                stages.setdefault(parsed[0], set()).add(parsed[1])
        return {key: frozenset(names) for key, names in stages.items()}

    def find(self, step: str, listing: str, provisional: StepKey | None = None) -> StepKey | None:
        """The key under which a listing of ``step`` was seen; see `preferred`."""
        seen = [key for key, names in self.keys(step).items() if "seen" in names]
        return preferred(
            (key for key in seen if self.read(key, "seen").facts.get("listing") == listing), provisional
        )

    def read(self, key: StepKey, stage: str) -> LedgerRecord:
        """One record.

        Raises:
            NotFoundError: there is none.
            EnvironmentFault: the object is not a ledger record.
        """
        name = _name(key, stage)
        return parse_record(self.store.read(name, RECORD_LIMIT), f"{self.store.url}/{name}")


def parse_record(data: bytes, url: str) -> LedgerRecord:
    """Decode a record's bytes. Raises `EnvironmentFault` naming ``url`` if they are none."""
    try:
        record = LedgerRecord.model_validate_json(data)
        datetime.fromisoformat(record.when)
    except (ValidationError, ValueError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise EnvironmentFault(
            f"{url} is no ledger record ({reason}); delete it to do its stage again"
        ) from None
    return record


def create_once(store: Store, name: str, data: bytes) -> bool:
    """Create a small object; False if it existed. ``data`` must differ from any other writer's.

    A store that fails may have written nonetheless: then the object's content tells whose it is.
    """
    doubtful = False
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            store.create(name, data)
        except AlreadyExistsError:
            return doubtful and store.read(name, RECORD_LIMIT) == data
        except UnreachableError:
            doubtful = True
            if attempt == _ATTEMPTS:
                raise
            time.sleep(0.2 * attempt)
        else:
            break
    return True


def _name(key: StepKey, stage: str) -> str:
    name = f"{key.step}/{key.fingerprint}/{stage}.json"
    if not is_safe_name(name) or parse_name(name) != (key, stage):
        raise ValueError(f"{name!r} cannot name a ledger record")
    return name
