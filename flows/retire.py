"""The Prefect flow `retire_checkpoints`: retention, as `ckpt retire` does it, on a schedule."""

from __future__ import annotations

from prefect import flow
from prefect.logging import get_run_logger

from dcp.errors import EnvironmentFault
from flows.retiring import RetireReport, retire_runs
from flows.settings import DEFAULT_FILE, load_settings


class RetireFailedError(EnvironmentFault):
    """Something could not be carried out; the next run goes on from there."""

    def __init__(self, report: RetireReport) -> None:
        failed = [f"{d.step}: {d.failed}" for run in report.runs for d in run.decisions if d.failed]
        failed += [f"{run.run}: {run.error}" for run in report.runs if run.error]
        super().__init__("; ".join(failed[:5]))
        self.report = report


@flow(name="retire-checkpoints", persist_result=False)
def retire_checkpoints(
    config: str = DEFAULT_FILE, run: str | None = None, apply: bool = False
) -> RetireReport:
    """Say which steps of the training buckets are not kept, and with `apply` put them into the trash.

    Steps whose time in the trash is over are deleted where the settings allow it.

    Args:
        config: path of the settings file.
        run: only the run of this name.
        apply: carry it out; otherwise nothing is written.
    """
    report = retire_runs(load_settings(config), run, apply=apply)
    logger = get_run_logger()
    for one in report.runs:
        for warning in one.warnings:
            logger.warning("%s: %s", one.run, warning)
        for decision in one.decisions:
            logger.info("%s %s: %s, %s", one.run, decision.step, decision.action, decision.why)
    if not report.ok:
        raise RetireFailedError(report)
    return report
