"""What processing a step takes (`Workshop`) and what it gives (`StepReport`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, ParamSpec, Protocol, TypeVar

from dcp.contract import Contract
from dcp.errors import NotFoundError, SettingsError, UsageError
from dcp.findings import Report
from flows.settings import LifecycleSettings, RunSettings
from tasks.after import Announce, Deploy, FollowUp
from tasks.alert import AlertReport, Emit
from tasks.export import StepExport
from tasks.leases import Leases
from tasks.ledger import Ledger, Stage, StepKey
from tasks.validate import expected_contract

P = ParamSpec("P")
R = TypeVar("R")

Outcome = Literal["published", "problem", "retry", "writing", "leased", "queued"]
"""``problem``: a verdict was reached or the attempts are used up, and people were told. ``retry``: the
environment failed and a later pass tries again. ``writing``: it is too early to judge. ``leased``: another
worker is processing it, or one that has just died still holds the place of its export. ``queued``: a flow run
of its own processes it, or will once fewer are unfinished."""


_FIELDS: dict[Stage, str] = {
    "validate": "source",
    "test-load": "layouts",
    "export": "exports",
    "publish": "publish",
}
"""What a stage takes from the settings of a run."""


class StepGoneError(NotFoundError):
    """The step is not in the source any more. No other absent thing may be taken for this."""


class StageSettingsError(SettingsError):
    """A stage cannot do with one step what the settings ask of it; with other steps it may."""


class StageOutcome(Report):
    """What became of one stage in this call. ``seconds`` is 0 for one that was done before."""

    stage: Stage
    outcome: Literal["done", "skipped", "failed"]
    seconds: float = 0.0


class StepReport(Report):
    """What became of a step in this call."""

    run: str
    step: str
    number: int
    url: str
    fingerprint: str | None
    outcome: Outcome
    problem: str | None = None
    message: str = ""
    attempts: int = 0
    """Failed attempts so far."""
    stages: list[StageOutcome]
    published: str | None = None
    """URL of the published directory."""
    partial: str = ""
    """What of the step's tensors the published files lack; empty where they hold all that was asked for."""
    after: FollowUp | None = None
    """What became of what follows the publication, where anything was tried in this call."""
    alerts: list[AlertReport]
    unreachable: bool = False
    """Storage did not answer, so other steps of the run need not be tried now."""


class Call(Protocol):
    """Runs a stage."""

    def __call__(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...


class ExportStep(Protocol):
    """Exports certain bytes of a step somewhere else; see `flows.elsewhere`."""

    def __call__(self, key: StepKey, attempt: int, parts: Sequence[str], /) -> StepExport: ...


def call_directly(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """The `Call` that only calls."""
    return function(*args, **kwargs)


@dataclass(frozen=True)
class Workshop:
    """What processing steps of one run needs."""

    settings: LifecycleSettings
    run: RunSettings
    ledger: Ledger
    leases: Leases
    call: Call
    emit: Emit | None
    elsewhere: ExportStep | None = None
    """Exports where a worker is large enough; None exports here."""
    announce: Announce | None = None
    deploy: Deploy | None = None
    """Starts a deployment after a publication; None where there is no Prefect."""

    @classmethod
    def of(
        cls,
        settings: LifecycleSettings,
        run: str,
        *,
        call: Call = call_directly,
        emit: Emit | None = None,
        announce: Announce | None = None,
        deploy: Deploy | None = None,
    ) -> Workshop:
        """Open the ledger of the run called ``run``; nothing is read."""
        chosen = settings.run(run)
        ledger = Ledger.open(chosen.publish, chosen.name, **chosen.publish_options)
        leases = Leases(ledger.store, settings.lease_expiry)
        return cls(settings, chosen, ledger, leases, call, emit, announce=announce, deploy=deploy)

    def expected(self, number: int) -> Contract | None:
        """What the keys of the step of this number are held against.

        Raises:
            SettingsError: the contract file in the settings is absent, or no contract.
            StorageError: it, or the ledger, cannot be read.
        """
        run = self.run
        try:
            return expected_contract(run.expectation, self.ledger, number, patterns=run.step_pattern)
        except (UsageError, NotFoundError) as error:
            if run.expectation in ("none", "previous"):
                raise
            raise SettingsError(f"{self.settings.field(run, 'expectation')}: {error}") from None

    def mistaken(self, stage: Stage, step: str, error: UsageError) -> StageSettingsError:
        """What is said where ``stage`` found that it was asked for something impossible."""
        field = self.settings.field(self.run, _FIELDS[stage])
        return StageSettingsError(f"{field}: {stage} of {step}: {error}")
