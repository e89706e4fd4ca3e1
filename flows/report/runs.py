"""Everything that the page of one or more runs says, gathered as values: `gather_runs`.

The state of each step is that of `flows.status`; what stages took, what they found and which tensors changed
is read from the ledger's records, of the newest `DETAILED` steps only. Nothing is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from dcp.errors import CkptError
from dcp.findings import Finding
from dcp.storage import ByteRange, fetch, join_url
from flows.report.problems import Problem, problems_of
from flows.settings import LifecycleSettings, RunSettings
from flows.status import AlertStatus, RunStatus, StepStatus, run_status
from flows.text import name, problem_name
from tasks.ledger import (
    DONE,
    RECORD_LIMIT,
    Ledger,
    LedgerRecord,
    Stage,
    StepKey,
    failures,
    parse_name,
    parse_record,
)

DETAILED = 120
"""Steps of a run, the newest, whose records are read."""
LISTED = 500
"""Steps of a run, the newest, that are listed; those with a problem are listed anyway."""


@dataclass(frozen=True, slots=True)
class StageFact:
    """One stage of a step. ``seconds`` is None where the ledger does not tell."""

    stage: Stage
    state: str
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Told:
    """One alert: ``when`` in ISO 8601, ``state`` as in `flows.status.AlertStatus`."""

    step: str
    """Empty for one of the run as a whole."""
    problem: str
    what: str
    """One line, where the alert has one."""
    when: str
    state: str


@dataclass(frozen=True, slots=True)
class StepFact:
    """One step. ``saved`` is UTC in ISO 8601, ``interval`` seconds since the step before was saved."""

    name: str
    number: int
    state: str
    word: str
    stages: tuple[StageFact, ...]
    bytes: int
    saved: str | None
    interval: float | None
    warnings: int
    message: str
    problems: tuple[Problem, ...]
    aliases: tuple[str, ...]
    url: str
    published: str | None
    published_bytes: int | None
    partial: str
    """What was published lacks, if anything."""
    unchanged: int | None
    """Tensors of the artifact that are those of the published step before; None where nothing tells."""
    tensors: int | None
    norms: Mapping[str, float]
    """By first part of the key; only of runs that are scrubbed."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One run. ``source_bytes`` and ``counts`` are of all its steps."""

    name: str
    source: str
    error: str
    troubles: tuple[Told, ...]
    """What is wrong with the run as a whole, such as that it stopped saving."""
    quiet: float | None
    """Seconds since the newest commit; where there are too few of them to tell, since anything was saved."""
    usual_interval: float | None
    """Seconds between two commits, usually."""
    stalled: bool
    """Whether commits have stopped, told as an alert or not."""
    latest: StepFact | None
    steps: tuple[StepFact, ...]
    """Those that are listed, in order."""
    more_steps: int
    counts: Mapping[str, int]
    """Rows by state, of all steps; one that was saved over has a row for each time that it was published."""
    standing: int
    """Steps that are in the source."""
    source_bytes: int
    published_bytes: int
    alerts: tuple[Told, ...]
    unknown: tuple[str, ...]

    @property
    def safe(self) -> tuple[StepFact, ...]:
        """Listed steps that are published."""
        return tuple(step for step in self.steps if step.state == "published")

    @property
    def wrong(self) -> tuple[StepFact, ...]:
        """Steps with a problem."""
        return tuple(step for step in self.steps if step.state in ("problem", "failing"))

    @property
    def seconds(self) -> float:
        """Time that all stages of the listed steps took."""
        return sum(stage.seconds or 0.0 for step in self.steps for stage in step.stages)


@dataclass(frozen=True, slots=True)
class RunsFacts:
    """All runs of a settings file. ``made`` is UTC in ISO 8601."""

    title: str
    made: str
    runs: tuple[RunFacts, ...]


def gather_runs(settings: LifecycleSettings, run: str | None = None) -> RunsFacts:
    """Look at all runs, or at one.

    Raises:
        UsageError: there is no such run.
    """
    status = run_status(settings, run)
    now = datetime.fromisoformat(status.when).timestamp()
    runs = tuple(_run(settings.run(each.run), each, now) for each in status.runs)
    title = runs[0].name if len(runs) == 1 else settings.file.name
    return RunsFacts(title, status.when, runs)


def _run(settings: RunSettings, status: RunStatus, now: float) -> RunFacts:
    listed = _listed(status.steps)
    detailed = [step for step in listed if step.fingerprint][-DETAILED:]
    error = status.error or ""
    records: dict[StepKey, dict[str, LedgerRecord]] = {}
    if not error:
        try:
            records = _records(settings, detailed)
        except CkptError as failed:
            error = f"the ledger could not be read: {failed}"
    times = {step.step: now - step.age for step in status.steps if step.age is not None}
    intervals = _intervals(times)
    quiet = status.saving.quiet
    steps = _facts(settings, listed, records, times, intervals)
    counts: dict[str, int] = {}
    for step in status.steps:
        counts[step.state] = counts.get(step.state, 0) + 1
    latest = next((step for step in steps if "latest" in step.aliases), None)
    return RunFacts(
        name=name(status.run),
        source=name(status.source, 1000),
        error=name(error, 600) if error else "",
        troubles=tuple(
            _told("", alert) for alert in status.alerts if not alert.over and alert.problem != "recovered"
        ),
        quiet=now - max(times.values()) if quiet is None and times else quiet,
        usual_interval=status.saving.usual,
        stalled=status.saving.state == "stalled",
        latest=latest,
        steps=tuple(steps),
        more_steps=len(status.steps) - len(listed),
        counts=counts,
        standing=sum(step.files > 0 for step in status.steps),
        source_bytes=sum(step.bytes for step in status.steps),
        published_bytes=sum(step.published_bytes or 0 for step in steps),
        alerts=(
            *(_told("", alert) for alert in reversed(status.alerts)),
            *(_told(step.step, alert) for step in reversed(status.steps) for alert in step.alerts),
        )[:LISTED],
        unknown=tuple(name(each) for each in status.unknown[:20]),
    )


def _told(step: str, alert: AlertStatus) -> Told:
    return Told(
        step=name(step) if step else "",
        problem=name(problem_name(alert.problem)),
        what=name(alert.title, 300) if alert.title else "",
        when=alert.told,
        state=alert.state,
    )


def _listed(steps: Sequence[StepStatus]) -> list[StepStatus]:
    """The newest steps, and before them the newest of those with a problem or an alias."""
    new, old = steps[-LISTED:], steps[:-LISTED]
    remarkable = [step for step in old if step.problem or step.aliases or step.state == "failing"]
    return [*remarkable[-LISTED:], *new]


def _records(settings: RunSettings, steps: Iterable[StepStatus]) -> dict[StepKey, dict[str, LedgerRecord]]:
    """Records of the stages and the last failure of some steps, from one listing, read in parallel."""
    ledger = Ledger.open(settings.publish, settings.name, **settings.publish_options)
    wanted = {StepKey(step.step, step.fingerprint) for step in steps if step.fingerprint}
    infos: dict[StepKey, dict[str, ByteRange]] = {}
    for info in ledger.objects():
        parsed = parse_name(info.name)
        if parsed and parsed[0] in wanted and info.size <= RECORD_LIMIT:
            infos.setdefault(parsed[0], {})[parsed[1]] = ByteRange(info.name, 0, info.size)
    ranges: dict[str, tuple[StepKey, str, ByteRange]] = {}
    for key, stages in infos.items():
        last = failures(stages)[-1:]
        for stage in (*DONE.values(), *last):
            if stage in stages:
                ranges[stages[stage].name] = (key, stage, stages[stage])
    found: dict[StepKey, dict[str, LedgerRecord]] = {}
    for item, data in fetch(ledger.store, [each[2] for each in ranges.values()], threads=8):
        key, stage, _ = ranges[item.name]
        found.setdefault(key, {})[stage] = parse_record(data, join_url(ledger.store.url, item.name))
    return found


def _facts(
    settings: RunSettings,
    listed: Sequence[StepStatus],
    records: Mapping[StepKey, Mapping[str, LedgerRecord]],
    times: Mapping[str, float],
    intervals: Mapping[str, float],
) -> list[StepFact]:
    found = []
    before: Mapping[str, str] = {}
    for step in listed:
        known = records.get(StepKey(step.step, step.fingerprint or ""), {})
        facts = {stage: record.facts for stage, record in known.items()}
        digests = _digests(facts.get("exported", {})) if step.state == "published" else {}
        same = sum(before.get(key) == digest for key, digest in digests.items()) if before else None
        url = join_url(settings.source, step.step)
        # Times are of what stands there now.
        there = step.state != "replaced"
        found.append(
            StepFact(
                name=name(step.step),
                number=step.number,
                state=step.state,
                word=problem_name(step.problem) if step.state == "problem" and step.problem else step.state,
                stages=tuple(
                    StageFact(stage, state, _seconds(facts.get(DONE[stage], {})))
                    for stage, state in step.stages.items()
                ),
                bytes=step.bytes,
                saved=_iso(times.get(step.step)) if there else None,
                interval=intervals.get(step.step) if there else None,
                warnings=step.warnings,
                message=name(step.message, 600) if step.message else "",
                problems=_problems(facts, step, url),
                aliases=tuple(step.aliases),
                url=name(url, 1000),
                published=step.published,
                published_bytes=_number(facts.get("published", {}).get("bytes")),
                partial=name(step.partial, 300) if step.partial else "",
                unchanged=same if digests else None,
                tensors=len(digests) or None,
                norms=_norms(facts.get("validated", {})),
            )
        )
        before = digests or before
    return found


def _problems(facts: Mapping[str, Mapping[str, Any]], step: StepStatus, url: str) -> tuple[Problem, ...]:
    """The findings that the last failure gives as examples, or the warnings of a step that is fine."""
    failed = failures(facts)
    if step.state in ("problem", "failing") and failed:
        kept = facts[failed[-1]].get("examples", ())
    else:
        kept = facts.get("validated", {}).get("findings", ())
    findings = [Finding.model_validate(each) for each in kept if isinstance(each, dict)]
    return problems_of(findings, url)


def _digests(exported: Mapping[str, Any]) -> dict[str, str]:
    """Digests of all tensors of a step's first artifact, by key."""
    artifacts = exported.get("artifacts") or [{}]
    tensors = artifacts[0].get("tensors", {})
    return {key: str(each.get("digest")) for key, each in tensors.items()}


def _norms(validated: Mapping[str, Any]) -> dict[str, float]:
    norms = validated.get("norms")
    known = norms if isinstance(norms, dict) else {}
    return {
        name(group): float(v) for group, v in known.items() if isinstance(v, int | float) and math.isfinite(v)
    }


def _seconds(facts: Mapping[str, Any]) -> float | None:
    value = facts.get("seconds")
    return float(value) if isinstance(value, int | float) else None


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _intervals(times: Mapping[str, float]) -> dict[str, float]:
    """Seconds since the step before was saved, by step; ``times`` is in the order of their numbers."""
    names = list(times)
    return {
        after: times[after] - times[before]
        for before, after in pairwise(names)
        if times[after] > times[before]
    }


def _iso(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
