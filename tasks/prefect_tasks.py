"""The stages as Prefect tasks: the same functions, with retries where storage may answer the next time.

`call_as_task` is the `Call` of the flows. Arguments are URLs and small values, nothing is cached or
persisted, since the ledger is what remembers. `emit` turns an `Alert` into a Prefect event.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import FlowRun, State, TaskRun
from prefect.events import emit_event
from prefect.utilities.annotations import quote

from dcp.errors import CkptError, EnvironmentFault, UnreachableError
from dcp.validation import ValidationReport
from tasks.after import Publication
from tasks.alert import Alert
from tasks.artifacts import artifact_key
from tasks.export import StepExport, export_step
from tasks.load_check import LoadCheckReport, load_check_step
from tasks.progress import ProgressArtifact, told
from tasks.publish import publish_step
from tasks.validate import validate_step

P = ParamSpec("P")
R = TypeVar("R")

RETRIES = 2
RETRY_SECONDS = (1.0, 10.0)


def storage_may_answer(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """Retry only where storage did not answer: any other failure would be the same again."""
    try:
        state.result()
    except UnreachableError:
        return True
    # A verdict, a bug or a cancellation: none of them passes by waiting.
    except BaseException:
        return False
    return False


def _task(function: Callable[P, R], name: str) -> Task[P, R]:
    return Task(
        function,
        name=name,
        retries=RETRIES,
        retry_delay_seconds=list(RETRY_SECONDS),
        retry_condition_fn=storage_may_answer,
        cache_policy=NO_CACHE,
        persist_result=False,
    )


@wraps(export_step)
def _export(url: str, *args: Any, **kwargs: Any) -> StepExport:
    """`export_step`, with its progress as an artifact of the run."""
    place = url.rstrip("/").split("/")[-2:]
    key = artifact_key(place[0], "export-progress")
    with ProgressArtifact(f"export of {'/'.join(place)}", key=key) as progress:
        return export_step(url, *args, **{**kwargs, "progress": progress})


@wraps(validate_step)
def _validate(url: str, *args: Any, **kwargs: Any) -> ValidationReport:
    """`validate_step`, whose scrub is told to whoever listens."""
    return validate_step(url, *args, **{**kwargs, "progress": told(f"validate {_name(url)}")})


@wraps(load_check_step)
def _load_check(url: str, *args: Any, **kwargs: Any) -> LoadCheckReport:
    """`load_check_step`, told to whoever listens."""
    return load_check_step(url, *args, **{**kwargs, "progress": told(f"test-load {_name(url)}")})


def _name(url: str) -> str:
    return url.rstrip("/").rpartition("/")[2]


validate_task = _task(_validate, "validate")
load_check_task = _task(_load_check, "test-load")
export_task = _task(_export, "export")
publish_task = _task(publish_step, "publish")

_TASKS: dict[Callable[..., Any], Task[..., Any]] = {
    validate_step: validate_task,
    load_check_step: load_check_task,
    export_step: export_task,
    publish_step: publish_task,
}


def call_as_task(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a stage as the Prefect task that it is, and anything else as it stands. From within a flow only."""
    spare_tracebacks()
    if function not in _TASKS:
        return function(*args, **kwargs)
    # Unquoted, Prefect would walk through arguments in search of other tasks' results: some are large, and
    # it takes a contract's ``keys`` for a mapping's method.
    quoted = {name: quote(value) for name, value in kwargs.items()}
    task = cast(Task[..., R], _TASKS[function])
    return task(*(quote(value) for value in args), **quoted)


def spare_tracebacks() -> None:
    """Keep Prefect from logging the traceback of errors whose message says all there is to know."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_without_traceback)


def _without_traceback(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    if isinstance(error, CkptError):
        record.exc_info = None
    return True


def emit(alert: Alert) -> None:
    """Emit ``checkpoint.<problem>`` about ``checkpoint.<run>.<step>``, or ``checkpoint.<run>`` as a whole."""
    emit_event(
        event=alert.event,
        resource={
            "prefect.resource.id": alert.resource,
            "prefect.resource.name": f"{alert.run} {alert.step}".strip(),
        },
        payload={
            "title": alert.title,
            "what": alert.what,
            "where": alert.where,
            "since": alert.since,
            "command": alert.command,
            "advice": alert.advice,
            "fingerprint": alert.fingerprint,
        },
    )


def announce(publication: Publication) -> None:
    """Emit ``checkpoint.published`` about the resource ``checkpoint.<run>.<step>``."""
    emit_event(
        event=publication.event,
        resource={
            "prefect.resource.id": publication.resource,
            "prefect.resource.name": f"{publication.run} {publication.step}",
        },
        payload=publication.payload,
    )


def start_deployment(name: str, parameters: Mapping[str, Any], key: str) -> str:
    """Start a run of the deployment ``name``, once for each idempotency key, and return the run's name.

    Raises:
        EnvironmentFault: there is no such deployment, or Prefect does not take the run.
    """
    from prefect.deployments import run_deployment
    from prefect.exceptions import ObjectNotFound, PrefectException

    try:
        run = cast(
            FlowRun,
            run_deployment(
                name, parameters=dict(parameters), timeout=0, idempotency_key=key, as_subflow=False
            ),
        )
    except ObjectNotFound:
        raise EnvironmentFault(f"there is no deployment {name} on Prefect's server") from None
    except (PrefectException, ValueError) as error:
        raise EnvironmentFault(f"{name} was not started ({' '.join(str(error).split())[:300]})") from error
    return str(run.name)
