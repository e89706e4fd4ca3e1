"""How a worker elsewhere tells the one that waits for it what became of an export.

Success is the step's ``exported`` record itself. A failure stands beside the records in an object of its own
(`FailedExport`), because it is the one who waits who counts attempts and tells people. What neither left was
killed, cancelled or never begun.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from dcp.errors import CheckpointError, EnvironmentFault, NotFoundError, UsageError
from tasks.export import StepExport
from tasks.ledger import DONE, RECORD_LIMIT, Failure, Ledger, StepKey, create_once
from tasks.manifest import Artifact
from tasks.outcomes import StageFailedError, failure_of_error

_TOKEN = re.compile(r"[a-z0-9-]{1,80}", re.ASCII)


class FailedExport(BaseModel):
    """What went wrong: ``failure``, or a ``mistake`` in the settings, of which nothing is recorded."""

    schema_version: Literal[1] = 1
    token: str
    failure: Failure | None = None
    mistake: str | None = None


def facts_of(report: StepExport, seconds: float) -> dict[str, Any]:
    """What the ``exported`` record says."""
    return {"artifacts": [a.model_dump(mode="json") for a in report.artifacts], "seconds": seconds}


def artifacts_of(ledger: Ledger, key: StepKey) -> list[Artifact]:
    """The artifacts in the ``exported`` record. Raises `NotFoundError` if there is none."""
    facts = ledger.read(key, DONE["export"]).facts
    return [Artifact.model_validate(artifact) for artifact in facts["artifacts"]]


def hand_over_success(ledger: Ledger, key: StepKey, report: StepExport, seconds: float) -> None:
    """Record that the step is exported."""
    ledger.create(key, DONE["export"], facts_of(report, seconds))


def hand_over_failure(ledger: Ledger, key: StepKey, token: str, error: Exception) -> FailedExport:
    """Leave ``error`` for whoever waits for the export called ``token``."""
    failed = FailedExport(token=token)
    if isinstance(error, UsageError):
        failed.mistake = str(error)
    else:
        failed.failure = failure_of_error("export", error)
    create_once(ledger.store, _name(key, token), failed.model_dump_json(indent=1).encode())
    return failed


def raise_failure(ledger: Ledger, key: StepKey, token: str) -> None:
    """Raise what the export called ``token`` left, if it left anything.

    Raises:
        UsageError: the settings ask for what cannot be done.
        StageFailedError: it failed.
        EnvironmentFault: what it left cannot be read.
    """
    name = _name(key, token)
    try:
        failed = FailedExport.model_validate_json(ledger.store.read(name, RECORD_LIMIT))
    except NotFoundError:
        return
    except (ValidationError, CheckpointError) as error:
        raise EnvironmentFault(f"{ledger.store.url}/{name} says nothing that can be read ({error})") from None
    if failed.mistake is not None:
        raise UsageError(failed.mistake)
    if failed.failure is not None:
        raise StageFailedError(failed.failure)


def _name(key: StepKey, token: str) -> str:
    if not _TOKEN.fullmatch(token):
        raise UsageError(f"{token!r} cannot name an export")
    return f"{key.step}/{key.fingerprint}/export-{token}.json"
