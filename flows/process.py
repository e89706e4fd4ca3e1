"""The Prefect flow `process_checkpoint`: one step through its life, each stage a task.

A step on which the environment failed ends as a failed flow run (`StepFailedError` carries its report); a
step that was found bad does not, since the pipeline did its work and people were told.
"""

from __future__ import annotations

from dataclasses import replace

from prefect import flow
from prefect.logging import get_run_logger

from dcp.errors import EnvironmentFault
from dcp.storage import join_url
from flows.elsewhere import ExportElsewhere
from flows.flow_runs import prefect_here
from flows.lifecycle import process_step
from flows.settings import DEFAULT_FILE, LifecycleSettings, load_settings
from flows.showing import Showing
from flows.workshop import StepReport, Workshop
from tasks.artifacts import Artifacts
from tasks.prefect_tasks import announce, call_as_task, emit, start_deployment


class StepFailedError(EnvironmentFault):
    """The environment failed a stage; a later pass tries again."""

    def __init__(self, report: StepReport) -> None:
        super().__init__(f"{report.url}: {report.message}")
        self.report = report


@flow(name="process-checkpoint", flow_run_name="{run}-{step}", persist_result=False)
def process_checkpoint(
    run: str, step: str, config: str = DEFAULT_FILE, force: bool = False, accept_keys: bool = False
) -> StepReport:
    """Validate, test-load, export and publish one step.

    Args:
        run: name of the run in the settings.
        step: name of the step's directory.
        config: path of the settings file.
        force: try again what has failed for good, and beyond the limit of attempts.
        accept_keys: its keys are meant, though they are not those of the step before.
    """
    settings = load_settings(config)
    with Artifacts() as artifacts:
        url = join_url(settings.run(run).source, step)
        showing = Showing(artifacts, run, step, url, call_as_task)
        workshop = Workshop.of(
            settings, run, call=showing, emit=emit, announce=announce, deploy=start_deployment
        )
        if settings.deploy.pools:
            elsewhere = ExportElsewhere(settings, workshop.run, workshop.ledger)
            workshop = replace(workshop, elsewhere=elsewhere)
        report = process_step(workshop, step, force=force, accept_keys=accept_keys)
        showing.finish(report)
    logger = get_run_logger()
    for alert in report.alerts:
        for delivery in alert.deliveries:
            if not delivery.ok:
                logger.warning(
                    "alert %s not delivered to %s: %s", alert.record, delivery.sink, delivery.error
                )
    if report.outcome == "retry":
        raise StepFailedError(report)
    logger.log(
        30 if report.problem else 20,
        "%s is %s%s",
        report.url,
        report.problem or report.outcome,
        f": {report.message}" if report.message else "",
    )
    return report


def run_step(
    settings: LifecycleSettings, url: str, *, force: bool = True, accept_keys: bool = False
) -> StepReport:
    """Process the step at ``url`` of whichever run it belongs to, as `ckpt run` does.

    Raises:
        UsageError: it belongs to no run.
        StorageError: source or ledger cannot be listed or written.
        EnvironmentFault: Prefect does not work.
    """
    run, step = settings.run_of(url)
    with prefect_here():
        return process_in_flow(settings, run.name, step, force=force, accept_keys=accept_keys)


def process_in_flow(
    settings: LifecycleSettings, run: str, step: str, *, force: bool = False, accept_keys: bool = False
) -> StepReport:
    """Run `process_checkpoint` here and give its report, also where the environment failed."""
    try:
        return process_checkpoint(
            run=run, step=step, config=str(settings.file), force=force, accept_keys=accept_keys
        )
    except StepFailedError as failed:
        return failed.report


def process_step_on_notice(settings: LifecycleSettings, run: str, step: str) -> StepReport:
    """Process a step that somebody said is committed: here, or on a worker where the settings say so.

    Raises:
        StepGoneError: there is no such step.
        StorageError: source or ledger cannot be listed or written.
        EnvironmentFault: Prefect does not work.
    """
    with prefect_here():
        if settings.deploy.steps == "runs":
            from flows.submit import Submitter

            return Submitter(settings)(settings.run(run), step)
        return process_in_flow(settings, run, step)
