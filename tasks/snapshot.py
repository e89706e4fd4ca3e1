"""A whole ledger at a glance, for a price that does not grow with what is finished.

`take_snapshot` lists the ledger once; the names alone say which stages are done. The few facts that
decisions need from inside records are kept in one extra object, `CACHE`: for each record its identity in
the listing and a `Summary`. Records never change, so a cached summary is right as long as the listing shows
the same identity; what is not cached is read from the record. The cache is never the truth: without it
everything is read again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from dcp.errors import CheckpointError, NotFoundError
from dcp.storage import ByteRange, ObjectInfo, fetch
from tasks.acceptance import Accepted
from tasks.discover import Sighting, sighting_of
from tasks.leases import Standing, standings
from tasks.ledger import RECORD_LIMIT, UNKNOWN, Ledger, StepKey, failures, parse_name, parse_record, preferred

CACHE = "cache.json"

_CACHE_LIMIT = 1 << 30
_SUMMARISED = re.compile(r"seen|validated|partial|failed-\d+|trashed-\d+|alerted.*")
_KEPT = (
    *("listing", "files", "changed", "committed"),
    *("stage", "final", "problem", "message", "errors", "warnings", "basis"),
    *("ok", "title", "last", "deliveries"),
)

Summary = Mapping[str, Any]
"""Some facts of a record (`_KEPT`) and its ``when``."""


@dataclass(frozen=True)
class Snapshot:
    """All records of a run by name, and summaries of those that matter."""

    stages: Mapping[StepKey, Mapping[str, ObjectInfo]]
    summaries: Mapping[StepKey, Mapping[str, Summary]]
    unknown: frozenset[str]
    """Directory names that were reported as no steps before."""
    by_step: Mapping[str, tuple[StepKey, ...]] = field(default_factory=dict)
    leases: Mapping[str, Standing] = field(default_factory=dict)
    """Leases by step, alive or not."""
    accepted: Accepted = field(default_factory=Accepted)

    def of(self, key: StepKey) -> frozenset[str]:
        """Names of the records of ``key``."""
        return frozenset(self.stages.get(key, ()))

    def summary(self, key: StepKey, stage: str) -> Summary:
        """What is kept of a record; empty if it does not exist."""
        return self.summaries.get(key, {}).get(stage, {})

    def key_of(self, step: str, listing: str, provisional: StepKey | None = None) -> StepKey | None:
        """The key of a step whose listing has the identity ``listing``, if it was seen; see `preferred`."""
        keys = self.by_step.get(step, ())
        return preferred(
            (key for key in keys if self.summary(key, "seen").get("listing") == listing), provisional
        )

    def sightings(self, step: str) -> list[Sighting]:
        """Every listing of a step that was recorded."""
        seen = (self.summary(key, "seen") for key in self.by_step.get(step, ()))
        return [sighting_of(facts, facts["when"]) for facts in seen if facts]

    def last_failure(self, key: StepKey) -> Summary | None:
        """The summary of the latest failed attempt."""
        numbered = failures(self.of(key))
        return self.summary(key, numbered[-1]) if numbered else None


def take_snapshot(ledger: Ledger, *, remember: bool) -> Snapshot:
    """List the ledger and complete the summaries.

    Args:
        remember: write the cache where something had to be read; False for callers that may only read.
    """
    stages: dict[StepKey, dict[str, ObjectInfo]] = {}
    unknown: list[ObjectInfo] = []
    cached: ObjectInfo | None = None
    listed = ledger.objects()
    for info in listed:
        parsed = parse_name(info.name)
        if parsed:
            stages.setdefault(parsed[0], {})[parsed[1]] = info
        elif info.name.startswith(UNKNOWN):
            unknown.append(info)
        elif info.name == CACHE:
            cached = info
    cache = _read_cache(ledger, cached) if cached else _Cached()
    complete = _completed(cache, ledger, stages, unknown)
    if remember and complete != cache:
        ledger.store.replace(CACHE, complete.model_dump_json().encode())
    by_step: dict[str, tuple[StepKey, ...]] = {}
    for key in stages:
        by_step[key.step] = (*by_step.get(key.step, ()), key)
    summaries = {
        StepKey(step, fingerprint): {stage: summary for stage, (_, summary) in records.items()}
        for step, fingerprints in complete.records.items()
        for fingerprint, records in fingerprints.items()
    }
    names = frozenset(name for names in complete.unknown.values() for name in names)
    return Snapshot(stages, summaries, names, by_step, standings(listed), Accepted.among(listed))


class _Cached(BaseModel):
    """Content of `CACHE`. ``records``: step -> fingerprint -> stage -> (identity, summary)."""

    schema_version: Literal[2] = 2
    records: dict[str, dict[str, dict[str, tuple[str, dict[str, Any]]]]] = {}
    unknown: dict[str, list[str]] = {}


def _read_cache(ledger: Ledger, info: ObjectInfo) -> _Cached:
    if info.size > _CACHE_LIMIT:
        return _Cached()
    try:
        return _Cached.model_validate_json(ledger.store.read_range(CACHE, 0, info.size))
    except (ValidationError, NotFoundError, CheckpointError):
        # Damaged, just being replaced, or of another version: it is rebuilt from the records.
        return _Cached()


def _completed(
    cache: _Cached,
    ledger: Ledger,
    stages: Mapping[StepKey, Mapping[str, ObjectInfo]],
    unknown: list[ObjectInfo],
) -> _Cached:
    """The cache of exactly the records listed; what ``cache`` lacks is read."""
    records: dict[str, dict[str, dict[str, tuple[str, dict[str, Any]]]]] = {}
    absent: dict[str, tuple[StepKey, str, ObjectInfo]] = {}
    for key, infos in stages.items():
        cached = cache.records.get(key.step, {}).get(key.fingerprint, {})
        kept = records.setdefault(key.step, {}).setdefault(key.fingerprint, {})
        for stage, info in infos.items():
            if not _SUMMARISED.fullmatch(stage):
                continue
            entry = cached.get(stage)
            if entry is not None and entry[0] == info.identity:
                kept[stage] = entry
            else:
                absent[info.name] = (key, stage, info)
    for name, data in _contents(ledger, [item[2] for item in absent.values()]):
        key, stage, info = absent[name]
        record = parse_record(data, f"{ledger.store.url}/{name}")
        summary = {k: record.facts[k] for k in _KEPT if k in record.facts} | {"when": record.at}
        records[key.step][key.fingerprint][stage] = (info.identity, summary)
    names = {info.name: cache.unknown[info.name] for info in unknown if info.name in cache.unknown}
    for name, data in _contents(ledger, [info for info in unknown if info.name not in names]):
        names[name] = list(parse_record(data, f"{ledger.store.url}/{name}").facts.get("names", ()))
    return _Cached(records=records, unknown=names)


def _contents(ledger: Ledger, infos: list[ObjectInfo]) -> Iterator[tuple[str, bytes]]:
    """The bytes of many records, read in parallel."""
    ranges = [ByteRange(info.name, 0, info.size) for info in infos if info.size <= RECORD_LIMIT]
    for item, data in fetch(ledger.store, ranges, threads=8):
        yield item.name, data
