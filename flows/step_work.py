"""What is done with a step and recorded of it: the ground on which its stages stand.

A `StepWork` knows the step, its key and its records. `attempt` runs a stage: its success is recorded by
`done`, its failure by `fail`, which ends the processing (`Stopped`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar

from dcp.checks.scrub import TensorHealth
from dcp.errors import BusyError, ChangedError, NotFoundError, StorageError, UsageError
from dcp.storage import join_url
from flows.telling import Teller
from flows.workshop import StageOutcome, Workshop
from tasks.after import FollowUp
from tasks.discover import (
    FoundStep,
    provisional_key,
)
from tasks.ledger import DONE, Failure, Stage
from tasks.manifest import published_directory
from tasks.outcomes import failure_of_error
from tasks.publish import require_unchanged

P = ParamSpec("P")
R = TypeVar("R")


class Stopped(Exception):
    """A stage failed and this is recorded."""


class Changing(Exception):
    """The step is not at rest; a later pass will look again."""


class Busy(Exception):
    """Somebody else is writing where this would, or has died there a moment ago; a later pass goes on."""


class StepWork:
    """A step that is being processed."""

    def __init__(
        self, workshop: Workshop, found: FoundStep, url: str, *, force: bool, accept_keys: bool
    ) -> None:
        self.workshop = workshop
        self.force = force
        self.accept_keys = accept_keys
        self.settings_of_run = workshop.run
        self.ledger = workshop.ledger
        self.call = workshop.call
        self.teller = Teller(workshop, url, found.survey.last_change)
        self.found = found
        self.url = url
        self.listing = found.survey.listing_identity
        self.look_up()
        self.stages: list[StageOutcome] = []
        self.tensors: Mapping[str, TensorHealth] | None = None
        self.unreachable = False
        self.partial = ""
        self.after: FollowUp | None = None

    def look_up(self) -> None:
        """Find out what the ledger knows of the step."""
        provisional = provisional_key(self.found.name, self.found.survey)
        self.key = self.ledger.find(self.found.name, self.listing, provisional) or provisional
        self.records = self.ledger.stages(self.key)

    @property
    def directory(self) -> str:
        """Where the step is published."""
        run = self.settings_of_run
        return join_url(run.publish, run.name, published_directory(self.key))

    def skips(self, stage: Stage) -> bool:
        """Whether a stage is done already, which is noted."""
        if DONE[stage] not in self.records:
            return False
        self.stages.append(StageOutcome(stage=stage, outcome="skipped"))
        return True

    def done(self, stage: Stage, facts: Mapping[str, Any], seconds: float) -> None:
        """Record that a stage is done."""
        self.ledger.create(self.key, DONE[stage], facts)
        self.stages.append(StageOutcome(stage=stage, outcome="done", seconds=seconds))

    def attempt(
        self, stage: Stage, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[R, float]:
        """Run a stage and return its report and seconds; a failure is recorded and ends the processing."""
        started = time.perf_counter()
        try:
            report = self.call(function, *args, **kwargs)
        except UsageError as error:
            # Nothing is wrong with the step, so nothing is recorded of it.
            mistake = self.workshop.mistaken(stage, self.found.name, error)
            self.teller.mistaken(str(mistake), self.found.name)
            raise mistake from None
        except BusyError as busy:
            # Neither the step nor the storage is at fault.
            raise Busy(str(busy)) from None
        # Whatever a stage raises must be recorded: otherwise it would be tried for ever and nobody told.
        except Exception as error:
            self.unreachable = isinstance(error, StorageError) and not isinstance(error, NotFoundError)
            failure = failure_of_error(stage, error)
            if stage != "validate":
                failure = self.unless_changed(failure)
            self.fail(failure, round(time.perf_counter() - started, 6))
        return report, round(time.perf_counter() - started, 6)

    def unless_changed(self, failure: Failure) -> Failure:
        """``failure``, or the one of a step that was saved over meanwhile, which explains any other."""
        if self.unreachable or failure.problem == "torn":
            return failure
        try:
            require_unchanged(self.url, self.listing, self.settings_of_run.options)
        except ChangedError as changed:
            return failure_of_error(failure.stage, changed)
        return failure

    def fail(self, failure: Failure, seconds: float) -> NoReturn:
        """Record a failed attempt and end the processing. Raises `Stopped`."""
        number = self.ledger.fail(self.key, failure)
        self.stages.append(StageOutcome(stage=failure.stage, outcome="failed", seconds=seconds))
        raise Stopped(failure, number)
