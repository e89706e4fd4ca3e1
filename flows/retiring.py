"""Retention over all runs: what the settings keep, what goes into the trash, what is deleted.

`directories_of` says of everything in a source what the lifecycle knows of it and what forbids touching it;
`retire_runs` plans and, only where it is told to apply the plan, carries it out. Published files are never
deleted here: whoever was given a published name may still use it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from pydantic import Field

from dcp.checkpoint import survey
from dcp.errors import ChangedError, EnvironmentFault, NotFoundError, UsageError
from dcp.findings import Report
from dcp.storage import Store, join_url, open_store
from flows.operation_settings import RetireSettings
from flows.settings import LifecycleSettings, RunSettings
from flows.survey import RunSurvey, key_of, survey_run
from tasks.aliases import AliasRecord, aliases
from tasks.discover import FoundStep, committed_at
from tasks.leases import Leases
from tasks.ledger import StepKey, timestamp
from tasks.manifest import published_directory, read_manifest
from tasks.retire import (
    AnyOf,
    Best,
    Decision,
    Directory,
    Every,
    Latest,
    NewerThan,
    Policy,
    delete_step,
    half_deleted,
    plan_retirement,
    put_into_trash,
    take_out_of_trash,
    trash_number,
)
from tasks.text import plain

_log = logging.getLogger(__name__)


class RunRetirement(Report):
    """What becomes of the directories of one run. ``freed`` is the bytes of steps deleted in this call."""

    run: str
    source: str
    ok: bool = True
    error: str | None = None
    decisions: list[Decision]
    freed: int = 0
    warnings: list[str] = Field(default_factory=list)
    """What the policy says and cannot mean, e.g. steps to keep that there are none of."""


class RetireReport(Report):
    """All runs that have a policy. ``applied`` is False for a dry run; ``when`` is UTC in ISO 8601."""

    when: str
    applied: bool
    ok: bool
    runs: list[RunRetirement]


def policy_of(settings: RetireSettings) -> Policy:
    """The policy that a table says."""
    policies: list[Policy] = []
    if settings.latest is not None:
        policies.append(Latest(settings.latest))
    if settings.every is not None:
        policies.append(Every(settings.every))
    if settings.newer_than is not None:
        policies.append(NewerThan(settings.newer_than))
    if settings.best:
        policies.append(Best(settings.best))
    return AnyOf(tuple(policies))


def retire_runs(settings: LifecycleSettings, run: str | None = None, *, apply: bool = False) -> RetireReport:
    """Decide what becomes of every directory, and carry it out if ``apply`` is set.

    Raises:
        UsageError: there is no such run, or no run has a policy.
    """
    chosen = [settings.run(run)] if run is not None else list(settings.runs)
    with_policy = [(one, one.retire) for one in chosen if one.retire is not None]
    if not with_policy:
        raise UsageError(
            f"no policy in {settings.file.name}: say in a table [runs.retire] what to keep, e.g. latest = 5"
        )
    runs = [_retire_run(settings, one, policy, apply) for one, policy in with_policy]
    return RetireReport(when=timestamp(time.time()), applied=apply, ok=all(one.ok for one in runs), runs=runs)


def _retire_run(
    settings: LifecycleSettings, run: RunSettings, retire: RetireSettings, apply: bool
) -> RunRetirement:
    report = RunRetirement(run=run.name, source=run.source, decisions=[])
    now = time.time()
    try:
        found = survey_run(
            run, resend_after=settings.resend_after, lease_expiry=settings.lease_expiry, remember=False
        )
        directories = directories_of(found, aliases(found.ledger.run_store))
        report.warnings = _nameless(settings, run, retire, directories)
        report.decisions = plan_retirement(
            directories, policy_of(retire), now=now, trash=retire.trash, delete=retire.delete
        )
        if apply:
            by_name = {directory.name: directory for directory in directories}
            kept = [one for one in report.decisions if one.action == "keep" and by_name[one.step].good]
            worker = _Worker(settings, found, retire, [by_name[one.step] for one in reversed(kept)])
            for decision in report.decisions:
                worker.carry_out(decision, by_name[decision.step])
            report.freed = worker.freed
            report.ok = not any(decision.failed for decision in report.decisions)
    except (EnvironmentFault, UsageError) as error:
        report.ok = False
        report.error = str(error)
    # Whatever is wrong with one run, the others are seen to.
    except Exception as error:
        _log.exception("run %s", run.name)
        report.ok = False
        report.error = plain(f"internal error: {type(error).__name__}: {error}")
    return report


def _nameless(
    settings: LifecycleSettings, run: RunSettings, retire: RetireSettings, directories: Sequence[Directory]
) -> list[str]:
    """What to say of names in ``best`` that no step has."""
    steps = {directory.name for directory in directories if directory.number is not None}
    place = f"{settings.field(run, 'retire')}.best"
    return [
        f"{place}: no step is called {name!r} in {run.source}, so it keeps nothing"
        for name in dict.fromkeys(retire.best)
        if name not in steps
    ]


def directories_of(found: RunSurvey, leads: Mapping[str, AliasRecord]) -> list[Directory]:
    """Everything in a source, steps in order, with what forbids touching it."""
    steps = [_directory(found, step, leads) for step in found.discovery.steps]
    present = {step.name for step in steps}
    steps += [
        # Nothing is left of it but the record that it is being deleted.
        Directory(key.step, None, key, "", 0, 0, None, deleting=True)
        for key in found.snapshot.stages
        if key.step not in present and _is_deleting(found, key)
    ]
    unknown = [
        Directory(name, None, None, "", 0, 0, None, guarded="no step of this run")
        for name in found.discovery.unknown
    ]
    return steps + unknown


def _is_deleting(found: RunSurvey, key: StepKey) -> bool:
    stages = found.snapshot.of(key)
    return "deleting" in stages and "retired" not in stages


def _directory(found: RunSurvey, step: FoundStep, leads: Mapping[str, AliasRecord]) -> Directory:
    key = key_of(step, found.snapshot)
    begun = next((k for k in found.snapshot.by_step.get(step.name, ()) if _is_deleting(found, k)), None)
    deleting = begun is not None and (begun == key or half_deleted(step, found.snapshot))
    stages = found.snapshot.of(key) if key else frozenset()
    number = trash_number(stages)
    trashed = None
    if key is not None and number is not None:
        trashed = found.snapshot.summary(key, f"trashed-{number}").get("when")
    return Directory(
        name=step.name,
        number=step.number,
        key=begun if deleting else key,
        listing=step.survey.listing_identity,
        bytes=step.bytes,
        files=len(step.survey.objects),
        committed=committed_at(step.survey),
        good=step.progress == "committed" and {"validated", "published"} <= stages,
        guarded=_guard(found, step, key, stages, leads),
        trashed=trashed,
        deleting=deleting,
    )


def _guard(
    found: RunSurvey,
    step: FoundStep,
    key: StepKey | None,
    stages: frozenset[str],
    leads: Mapping[str, AliasRecord],
) -> str:
    """Why a step must not be touched; empty if it may be."""
    led = sorted(alias for alias, record in leads.items() if record.step == step.name)
    if step.name in found.snapshot.leases:
        return "a worker is processing it"
    if step.progress != "committed":
        return {"writing": "it is being written", "incomplete": "it was never committed"}.get(
            step.progress, "it is no checkpoint"
        )
    if led:
        return f"the alias {', '.join(led)} leads to it"
    if key is None or "validated" not in stages:
        failure = found.snapshot.last_failure(key) if key else None
        return f"it did not validate: {failure.get('problem')}" if failure else "it is not validated yet"
    if "published" not in stages:
        failure = found.snapshot.last_failure(key)
        return f"it is not published: {failure.get('problem')} failed" if failure else "it is not published"
    return ""


class _Worker:
    """Carries out decisions of one run."""

    def __init__(
        self,
        settings: LifecycleSettings,
        found: RunSurvey,
        retire: RetireSettings,
        kept: Sequence[Directory],
    ) -> None:
        """``kept`` are the good steps that stay, the newest first."""
        self.found = found
        self.kept = kept
        self.ledger = found.ledger
        self.retire = retire
        self.leases = Leases(found.ledger.store, settings.lease_expiry)
        self.freed = 0

    def carry_out(self, decision: Decision, directory: Directory) -> None:
        """Do what was decided; what cannot be done is said in the decision."""
        key = directory.key
        try:
            if decision.action == "keep":
                if key is not None and directory.trashed is not None and not directory.deleting:
                    take_out_of_trash(self.ledger, key, decision.why)
            elif key is not None:
                if decision.action == "trash":
                    put_into_trash(self.ledger, key, decision.why)
                    decision.done = True
                else:
                    self._delete(decision, directory, key)
        except (EnvironmentFault, ChangedError) as error:
            decision.failed = str(error)

    def _delete(self, decision: Decision, directory: Directory, key: StepKey) -> None:
        lease = self.leases.acquire(directory.name)
        if lease is None:
            decision.failed = "another worker is processing it"
            return
        with lease:
            # Both may have changed since the plan was made.
            leads = aliases(self.ledger.run_store)
            led = [alias for alias, record in leads.items() if record.step == directory.name]
            if led and not directory.deleting:
                decision.failed = f"the alias {', '.join(sorted(led))} has been led to it"
                return
            if not directory.deleting and not self._stands_published(key):
                decision.failed = f"it is published nowhere: {published_directory(key)} has no manifest"
                return
            if not directory.deleting and not any(map(self._stands, self.kept)):
                decision.failed = "none of the good steps that are kept stands any more as it was"
                return
            delete_step(self.ledger, key, self._source(directory.name), directory.listing, decision.why)
        decision.done = True
        self.freed += directory.bytes

    def _stands_published(self, key: StepKey) -> bool:
        """Whether what was made of the step is still there: its ledger may outlive it."""
        return read_manifest(self.ledger.run_store.child(published_directory(key))) is not None

    def _stands(self, kept: Directory) -> bool:
        """Whether a step still stands as it was when it was decided which are deleted."""
        run = self.found.run
        try:
            return survey(join_url(run.source, kept.name), **run.options).listing_identity == kept.listing
        except NotFoundError:
            return False

    def _source(self, step: str) -> Store:
        """The step's directory, with the credentials for deleting."""
        run = self.found.run
        options = run.options if self.retire.options is None else self.retire.options
        return open_store(run.source, **options).child(step)
