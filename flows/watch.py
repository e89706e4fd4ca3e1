"""The Prefect flow `watch`: one pass over all runs. `watch_once` starts it only where something is due.

A pass that could not see to a run ends as a failed flow run (`PassFailedError` carries its report), so that
nobody takes a watcher without access for one that has nothing to do.
"""

from __future__ import annotations

from prefect import flow
from prefect.logging import get_run_logger

from dcp.errors import EnvironmentFault
from flows.flow_runs import end_orphans, prefect_here
from flows.passes import PassReport, run_pass, watch_once
from flows.prefect_faults import prefect_answers
from flows.process import process_in_flow
from flows.settings import DEFAULT_FILE, LifecycleSettings, RunSettings, load_settings
from flows.submit import FLOW, Submitter
from flows.workshop import StepReport
from tasks.prefect_tasks import emit, spare_tracebacks

__all__ = ["PassFailedError", "watch", "watch_once"]


class PassFailedError(EnvironmentFault):
    """Storage failed for some of the runs; whatever could be done for the others is done."""

    def __init__(self, report: PassReport) -> None:
        failed = [f"run {run.run}: {run.error}" for run in report.runs if run.error]
        super().__init__(f"not all runs could be seen to: {'; '.join(failed)}")
        self.report = report


@flow(name="watch", persist_result=False)
def watch(config: str = DEFAULT_FILE) -> PassReport:
    """Look at every run once and see to what is due, a flow run of `process-checkpoint` a step.

    They run within this one, or on workers where the settings say so.

    Args:
        config: path of the settings file.
    """
    settings = load_settings(config)

    submit = Submitter(settings) if settings.deploy.steps == "runs" else None

    def process(run: RunSettings, step: str) -> StepReport:
        with prefect_answers():
            return submit(run, step) if submit else process_in_flow(settings, run.name, step)

    for name in end_orphans("watch", FLOW):
        get_run_logger().info("ended the run %s, whose process was killed", name)
    report = run_pass(settings, process, emit=emit)
    logger = get_run_logger()
    spare_tracebacks()
    for run in report.runs:
        if run.error:
            logger.error("run %s: %s", run.run, run.error)
        if run.mistake:
            logger.error("%s", run.mistake)
        if run.unknown:
            logger.warning("run %s: not steps, left alone: %s", run.run, ", ".join(run.unknown[:20]))
    if any(run.error for run in report.runs):
        raise PassFailedError(report)
    return report


def watch_in_flow(settings: LifecycleSettings) -> PassReport:
    """One pass as a flow run in this process; its report, also where storage failed.

    Raises:
        EnvironmentFault: Prefect does not work.
    """
    with prefect_here():
        try:
            return watch(config=str(settings.file))
        except PassFailedError as failed:
            return failed.report
