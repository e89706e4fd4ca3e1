"""What follows the publication of a step, as the settings of its run say; see `tasks.after`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from dcp.errors import EnvironmentFault
from flows.operation_settings import AfterPublishSettings
from flows.workshop import Workshop
from tasks.after import (
    AFTER_DONE,
    AFTER_DUE,
    FollowUp,
    Publication,
    after_failures,
    follow_up,
    run_command,
)
from tasks.alert import told
from tasks.ledger import StepKey

FAILED = "after-publish"
RECOVERED = "after-publish-recovered"

_log = logging.getLogger(__name__)


def publication_of(workshop: Workshop, key: StepKey, number: int, facts: Mapping[str, Any]) -> Publication:
    """What is told about a published step, from the facts of its record ``published``."""
    return Publication(
        run=workshop.run.name,
        step=key.step,
        number=number,
        fingerprint=key.fingerprint,
        published=str(facts["url"]),
        manifest=str(facts["manifest"]),
        files=int(facts["files"]),
        bytes=int(facts["bytes"]),
    )


def announce(workshop: Workshop, publication: Publication, key: StepKey) -> None:
    """Before a step counts as published: emit its event, and note that something is to follow.

    A worker that dies afterwards does both again, so the event may come twice and is not lost.
    """
    if workshop.announce is not None:
        try:
            workshop.announce(publication)
        # Whatever the event client raises, the step is published.
        except Exception as error:
            _log.warning("no event %s for %s: %s", publication.event, publication.published, error)
    if workshop.run.after_publish is not None:
        workshop.ledger.create(key, AFTER_DUE)


def is_due(after: AfterPublishSettings | None, stages: frozenset[str], *, force: bool = False) -> bool:
    """Whether an attempt is to be made at what follows a publication."""
    if after is None or AFTER_DUE not in stages or AFTER_DONE in stages:
        return False
    return force or len(after_failures(stages)) < after.max_attempts


def is_untold(after: AfterPublishSettings | None, stages: frozenset[str], first: str | None) -> bool:
    """Whether people have still to be told of its failure, or of its success after a failure they know of.

    ``first`` is the problem of the record ``alerted``.
    """
    if after is None or AFTER_DUE not in stages:
        return False
    known = told(stages, first, FAILED)
    if AFTER_DONE in stages:
        return known and not told(stages, first, RECOVERED)
    return not known and len(after_failures(stages)) >= after.max_attempts


def follow(workshop: Workshop, publication: Publication, key: StepKey) -> FollowUp:
    """Make one attempt."""
    after = workshop.run.after_publish
    assert after is not None

    def start() -> str:
        if after.command:
            directory = str(workshop.settings.file.parent)
            return run_command(after.command, publication, directory=directory, timeout=after.timeout)
        if workshop.deploy is None:
            raise EnvironmentFault(f"the deployment {after.deployment} is started from Prefect flows only")
        parameters = {**after.parameters, "manifest": publication.manifest}
        run = workshop.deploy(after.deployment, parameters, f"after-publish:{key.step}:{key.fingerprint}")
        return f"flow run {run} of {after.deployment}"

    return follow_up(workshop.ledger, key, start)
