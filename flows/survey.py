"""What a run needs, decided from two listings and one small read, however many steps are finished.

`survey_run` lists source and ledger and gives a `RunSurvey`: steps that are due (`need_of`), alerts that are
due (of the run as a whole, `flows.run_telling`, and deliveries that failed before), and what is left alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from dcp.storage import open_store
from flows.following import is_due, is_untold
from flows.reaching import PROBLEM, end_outage
from flows.settings import RunSettings
from tasks.alert import Pending, pending_deliveries, told
from tasks.discover import Discovery, FoundStep, committed_at, compile_pattern, discover, step_number
from tasks.discover import provisional_key as provisional_key
from tasks.leases import EXPIRY, Leases
from tasks.ledger import RUN, Ledger, StepKey, failures
from tasks.partial import RECORD as PARTIAL
from tasks.retire import half_deleted
from tasks.run_health import Commit, Junk, Stall, find_junk, find_stall
from tasks.snapshot import Snapshot, Summary, take_snapshot

Need = Literal["nothing", "wait", "note", "process", "late"]
"""What a step needs now. ``note``: it is being written and only our own clock can tell for how long.
``late``: it came after a later step was published, and the settings leave such steps alone."""


@dataclass(frozen=True)
class RunSurvey:
    """A run as source and ledger show it, and what is due."""

    run: RunSettings
    ledger: Ledger
    discovery: Discovery
    snapshot: Snapshot
    due: tuple[str, ...] = ()
    """Names of steps to process, in the run's order."""
    leased: tuple[str, ...] = ()
    """Names of steps that a living worker is processing."""
    late: tuple[str, ...] = ()
    note: tuple[FoundStep, ...] = ()
    deliver: tuple[tuple[StepKey, Pending], ...] = ()
    stall: Stall | None = None
    junk: Junk | None = None
    unchanged: int = 0

    @property
    def unknown(self) -> tuple[str, ...]:
        """Directories that are no steps and were never reported."""
        return tuple(name for name in self.discovery.unknown if name not in self.snapshot.unknown)

    @property
    def to_tell(self) -> tuple[Stall | Junk, ...]:
        """Problems of the run that were never told."""
        found = (self.stall, self.junk)
        return tuple(one for one in found if one is not None and one.key not in self.snapshot.stages)

    @property
    def recovered(self) -> tuple[StepKey, ...]:
        """Problems of the run that were told and are no more."""
        over = []
        for problem, key in open_run_problems(self.snapshot).items():
            last = self.snapshot.summary(key, "alerted").get("last")
            if problem == "stalled":
                newest = max((commit.at for commit in self.commits), default=0.0)
                over += [key] if last is not None and newest > last + 1.0 else []
            elif problem == "junk":
                over += [key] if self.junk is None else []
            elif problem == PROBLEM:
                # Both were listed just now.
                over += [key]
            elif problem == "settings":
                over += [key] if not (self.due or self.leased) else []
            elif problem == PARTIAL:
                over += [key] if self._newest_is_whole else []
        return tuple(over)

    @property
    def _newest_is_whole(self) -> bool:
        """Whether the published step of the highest number has all its tensors."""
        patterns = [compile_pattern(pattern) for pattern in self.run.step_pattern]
        numbers = {
            key: step_number(key.step, patterns) or 0
            for key, stages in self.snapshot.stages.items()
            if "published" in stages
        }
        highest = max(numbers.values(), default=0)
        return not any(
            number == highest and PARTIAL in self.snapshot.of(key) for key, number in numbers.items()
        )

    @property
    def commits(self) -> list[Commit]:
        """Every commit that source or ledger knows of."""
        return _commits(self.run, self.discovery, self.snapshot)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to write and nothing to send."""
        return not (self.due or self.note or self.deliver or self.unknown or self.to_tell or self.recovered)


def survey_run(
    run: RunSettings,
    *,
    resend_after: float,
    lease_expiry: float = EXPIRY,
    now: float | None = None,
    remember: bool = True,
) -> RunSurvey:
    """List a run's source and ledger and decide what is due.

    Args:
        run: the run.
        resend_after, lease_expiry: as in the settings, in seconds.
        now: seconds since the epoch.
        remember: keep summaries of what had to be read from the ledger, and clear away what dead workers
            left; False for callers that may only read.

    Raises:
        StorageError: source or ledger could not be listed.
    """
    at = time.time() if now is None else now
    ledger = Ledger.open(run.publish, run.name, **run.publish_options)
    snapshot = take_snapshot(ledger, remember=remember)
    discovery = discover(
        open_store(run.source, **run.options),
        patterns=run.step_pattern,
        parts=run.parts,
        grace_seconds=run.grace_period,
        now=at,
        sightings=snapshot.sightings,
    )
    if remember:
        end_outage(ledger, snapshot)
    late = _late_steps(discovery, snapshot) if run.late_steps == "ignore" and not run.copied else frozenset()
    needs = {step.name: need_of(step, snapshot, run, late=step.name in late) for step in discovery.steps}
    due = [name for name, need in needs.items() if need == "process"]
    if run.order == "newest-first":
        due.reverse()
    leased = [name for name in due if name in snapshot.leases]
    if remember:
        leased = _alive(Leases(ledger.store, lease_expiry), snapshot, due)
    deliver = [
        (key, pending)
        for key, stages in snapshot.stages.items()
        if "alerted" in stages
        for pending in pending_deliveries(frozenset(stages), partial(snapshot.summary, key), at, resend_after)
    ]
    # Times of a copy say nothing of when its steps were committed.
    commits = [] if run.copied else _commits(run, discovery, snapshot)
    return RunSurvey(
        run=run,
        ledger=ledger,
        discovery=discovery,
        snapshot=snapshot,
        due=tuple(name for name in due if name not in leased),
        leased=tuple(leased),
        late=tuple(name for name, need in needs.items() if need == "late"),
        note=tuple(step for step in discovery.steps if needs[step.name] == "note"),
        deliver=tuple(deliver),
        stall=find_stall(commits, at, factor=run.stall_factor, minimum=run.stall_minimum),
        junk=find_junk(discovery.steps, size=run.junk_size, age=run.junk_age),
        unchanged=sum(need in ("nothing", "late") for need in needs.values()),
    )


def open_run_problems(snapshot: Snapshot) -> Mapping[str, StepKey]:
    """The newest alert of each problem of the whole run, unless its recovery has been told."""
    newest: dict[str, StepKey] = {}
    keys = [key for key in snapshot.by_step.get(RUN, ()) if "alerted" in snapshot.of(key)]
    for key in sorted(keys, key=lambda key: float(snapshot.summary(key, "alerted").get("when", 0.0))):
        newest[str(snapshot.summary(key, "alerted").get("problem"))] = key
    return {problem: key for problem, key in newest.items() if "alerted-recovered" not in snapshot.of(key)}


def _alive(leases: Leases, snapshot: Snapshot, due: Sequence[str]) -> list[str]:
    """Those of the due steps that a living worker holds; what dead ones left of other steps is removed."""
    held = []
    for name, standing in snapshot.leases.items():
        if name in due:
            held += [] if leases.dead(standing) else [name]
        else:
            leases.sweep(standing)
    return held


def _commits(run: RunSettings, discovery: Discovery, snapshot: Snapshot) -> list[Commit]:
    present = {step.name for step in discovery.steps}
    times = {step.name: committed_at(step.survey) for step in discovery.steps if step.progress == "committed"}
    patterns = [compile_pattern(pattern) for pattern in run.step_pattern]
    for name, keys in snapshot.by_step.items():
        if name in present or step_number(name, patterns) is None:
            continue
        committed = [key for key in keys if "validated" in snapshot.of(key)]
        known = [snapshot.summary(key, "seen").get("committed") for key in committed]
        times[name] = max((time for time in known if time is not None), default=None)
    return [Commit(at, name) for name, at in times.items() if at is not None]


def _late_steps(discovery: Discovery, snapshot: Snapshot) -> frozenset[str]:
    """Steps that were committed after one with a higher number that is published."""
    late = []
    earliest: float | None = None
    for step in reversed(discovery.steps):
        at = committed_at(step.survey)
        if earliest is not None and at is not None and at > earliest:
            late.append(step.name)
        key = key_of(step, snapshot)
        if key is not None and at is not None and "published" in snapshot.of(key):
            earliest = at if earliest is None else min(earliest, at)
    return frozenset(late)


def key_of(step: FoundStep, snapshot: Snapshot) -> StepKey | None:
    """Under which key the ledger knows a step as it is now."""
    keys = snapshot.by_step.get(step.name, ())
    if not keys:
        return None
    listing = step.survey.listing_identity
    if len(keys) == 1 and snapshot.summary(keys[0], "seen").get("listing") == listing:
        return keys[0]
    provisional = provisional_key(step.name, step.survey)
    known = snapshot.key_of(step.name, listing, provisional)
    return known or (provisional if provisional in snapshot.stages else None)


def need_of(step: FoundStep, snapshot: Snapshot, run: RunSettings, *, late: bool = False) -> Need:
    """What a step needs, from its listing and the ledger's names and summaries."""
    key = key_of(step, snapshot)
    if key is None and half_deleted(step, snapshot):
        return "nothing"
    if step.progress == "writing":
        return "note" if step.quiet is None and key is None else "wait"
    stages = snapshot.of(key) if key else frozenset()
    if key is None or stages <= {"seen"}:
        return "late" if late else "process"
    if stages & {"retired", "deleting"}:
        return "nothing"
    if "published" in stages:
        first = snapshot.summary(key, "alerted").get("problem")
        due = is_due(run.after_publish, stages) or is_untold(run.after_publish, stages, first)
        return "process" if due else "nothing"
    failure = snapshot.last_failure(key)
    if failure is None or judged_by_other_keys(failure, snapshot, step.number):
        return "process"
    settled = failure.get("final") or len(failures(stages)) >= run.max_attempts
    first = snapshot.summary(key, "alerted").get("problem")
    return "nothing" if settled and told(stages, first, str(failure.get("problem"))) else "process"


def judged_by_other_keys(failure: Summary, snapshot: Snapshot, number: int) -> bool:
    """Whether other keys have been accepted since a step was found bad for its own."""
    if failure.get("problem") != "key-mismatch":
        return False
    return failure.get("basis", "") != snapshot.accepted.basis(number)
