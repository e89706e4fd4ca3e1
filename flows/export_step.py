"""The Prefect flow `export-step`: what a worker of a pool does for `flows.elsewhere`.

It exports one step, which its parent has validated, into the published directory and records it. People are
told by the parent alone. A worker that takes the place of one that died waits until that one's claim on the
destination has expired: the parent waits for both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

from prefect import flow
from prefect.logging import get_run_logger

from dcp.errors import BusyError
from dcp.storage import join_url
from dcp.storage.claims import BEAT, EXPIRY
from flows.elsewhere import directory_of, lease_name, requests_of
from flows.settings import DEFAULT_FILE, load_settings
from flows.sharding import shard_mapper
from tasks.export import StepExport, export_step
from tasks.handover import hand_over_failure, hand_over_success
from tasks.leases import Leases
from tasks.ledger import Ledger, StepKey
from tasks.prefect_tasks import call_as_task

PATIENCE = EXPIRY + 2 * BEAT
"""Seconds for which the destination may be somebody else's: whoever died there counts as dead by then."""
PAUSE = 10.0


def once_free(
    export: Callable[[], StepExport], *, patience: float = PATIENCE, pause: float = PAUSE
) -> StepExport:
    """What ``export`` gives, tried again as long as another writer holds its destination.

    Args:
        export: makes the artifacts.
        patience: seconds after which that writer is taken to be alive.
        pause: seconds between two attempts.

    Raises:
        BusyError: it is held for longer than that.
        CkptError: what else ``export`` raises.
    """
    until = time.monotonic() + patience
    while True:
        try:
            return export()
        except BusyError:
            if time.monotonic() + pause > until:
                raise
        time.sleep(pause)


@flow(name="export-step", persist_result=False)
def export_one_step(
    run: str,
    step: str,
    fingerprint: str,
    token: str,
    parts: list[str] | None = None,
    config: str = DEFAULT_FILE,
) -> None:
    """Make the artifacts of one validated step. `process-checkpoint` starts this; people need not.

    Args:
        run: name of the run in the settings.
        step: name of the step's directory.
        fingerprint: identity of the step's bytes, 64 hexadecimal digits.
        token: names this attempt.
        parts: the checkpoints that make up the step; empty if it is one itself.
        config: path of the settings file on the worker.
    """
    settings = load_settings(config)
    chosen = settings.run(run)
    ledger = Ledger.open(chosen.publish, chosen.name, **chosen.publish_options)
    key = StepKey(step, fingerprint)
    started = time.perf_counter()
    lease = Leases(ledger.store, settings.lease_expiry).acquire(lease_name(step, token))
    try:
        with lease or nullcontext():
            report = once_free(
                lambda: call_as_task(
                    export_step,
                    join_url(chosen.source, step),
                    directory_of(chosen, key),
                    parts=parts or [],
                    requests=requests_of(chosen),
                    options=chosen.options,
                    publish_options=chosen.publish_options,
                    mapped=shard_mapper(settings.deploy),
                )
            )
    # Whatever it is, the parent must learn of it.
    except Exception as error:
        failed = hand_over_failure(ledger, key, token, error)
        if failed.failure is None or not failed.failure.final:
            raise
        get_run_logger().warning("%s cannot be exported: %s", step, error)
        return
    hand_over_success(ledger, key, report, round(time.perf_counter() - started, 6))
