"""The Prefect flow `audit-published`: hash again what is published, and tell people of damage."""

from __future__ import annotations

from prefect import flow
from prefect.logging import get_run_logger

from dcp.errors import EnvironmentFault, StorageError
from flows.settings import DEFAULT_FILE, load_settings
from tasks.audit import AuditReport, audit_run
from tasks.ledger import Ledger
from tasks.prefect_tasks import emit, spare_tracebacks


@flow(name="audit-published", persist_result=False)
def audit_published(
    run: str | None = None, deep: bool = False, newest: int | None = None, config: str = DEFAULT_FILE
) -> list[AuditReport]:
    """Compare every published file with its manifest; damage raises an alert.

    Args:
        run: only this run; all of the settings if empty.
        deep: compare every tensor's digest too, which takes longer.
        newest: only so many steps of each run, those published last; all if empty.
        config: path of the settings file on the worker.
    """
    settings = load_settings(config)
    logger = get_run_logger()
    spare_tracebacks()
    reports: list[AuditReport] = []
    unknown: list[str] = []
    for chosen in settings.runs if run is None else (settings.run(run),):
        try:
            report = audit_run(
                Ledger.open(chosen.publish, chosen.name, **chosen.publish_options),
                chosen.publish,
                deep=deep,
                newest=newest,
                options=chosen.publish_options,
                sinks=settings.alert_urls(chosen),
                emit=emit,
            )
        except StorageError as error:
            unknown.append(f"run {chosen.name}: {error}")
            continue
        reports.append(report)
        unknown += [f"run {chosen.name}: {text}" for text in report.unreachable]
        for found in report.damaged:
            logger.error("%s is damaged: %s", found.url, found.message)
        logger.info("run %s: %d steps, %d bytes hashed", report.run, report.steps, report.bytes)
    if unknown:
        raise EnvironmentFault(f"not all could be audited: {'; '.join(unknown[:5])}")
    return reports
