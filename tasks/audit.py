"""The stage *audit*: are published steps still what their manifests say, byte for byte?

`audit_run` hashes what a run has published and tells people of each step that is damaged, once for each step
as for any other problem. What cannot be reached is no damage: it is said in the report, and the next audit
comes back to it.
"""

from __future__ import annotations

import time
from typing import Any

from pydantic import Field

from dcp.errors import CheckpointError, NotFoundError, StorageError
from dcp.findings import Report
from dcp.storage import join_url
from tasks.alert import Alert, AlertReport, Emit, raise_alert
from tasks.ledger import DONE, Ledger, StepKey, timestamp
from tasks.manifest import published_directory
from tasks.snapshot import take_snapshot
from tasks.text import plain, typed
from tasks.verify import VerifyReport, verify

PROBLEM = "damaged"


class AuditReport(Report):
    """What an audit of one run found. ``bytes`` were read and hashed."""

    run: str
    ok: bool
    steps: int = 0
    """Published steps looked at."""
    bytes: int = 0
    seconds: float = 0.0
    damaged: list[VerifyReport] = Field(default_factory=list)
    """Those that are not what they were."""
    unreachable: list[str] = Field(default_factory=list)
    """Steps of which nothing is known because storage failed, with the reason."""
    alerts: list[AlertReport] = Field(default_factory=list)


def audit_run(
    ledger: Ledger,
    publish_root: str,
    *,
    deep: bool,
    newest: int | None,
    options: dict[str, Any],
    sinks: tuple[str, ...],
    emit: Emit | None,
) -> AuditReport:
    """Hash the published steps of a run.

    Args:
        ledger: of the run.
        publish_root: as in the settings.
        deep: compare every tensor's digest too.
        newest: only so many steps, those published last; all if None.
        options: fsspec options of the publish root.
        sinks: apprise URLs for alerts.
        emit: emits Prefect events for alerts.

    Raises:
        StorageError: the ledger cannot be read or written.
    """
    started = time.perf_counter()
    report = AuditReport(run=ledger.run, ok=True)
    for key in _published(ledger, newest):
        url = join_url(publish_root, ledger.run, published_directory(key))
        report.steps += 1
        try:
            found = verify(url, deep=deep, **options)
        except NotFoundError:
            found = _lost(url, key, "nothing is there any more")
        except CheckpointError as error:
            found = _lost(url, key, str(error))
        except StorageError as error:
            report.unreachable.append(f"{key.step}: {error}")
            continue
        report.bytes += found.bytes
        if not found.ok:
            report.damaged.append(found)
            report.alerts.append(raise_alert(ledger, key, _alert(ledger, key, found), sinks=sinks, emit=emit))
    report.ok = not report.damaged and not report.unreachable
    report.seconds = round(time.perf_counter() - started, 3)
    return report


def _published(ledger: Ledger, newest: int | None) -> list[StepKey]:
    """What the ledger says is published, the last one first."""
    stages = take_snapshot(ledger, remember=False).stages
    standing = [
        (infos[DONE["publish"]].modified or 0.0, key)
        for key, infos in stages.items()
        if DONE["publish"] in infos
    ]
    return [key for _, key in sorted(standing, reverse=True)][:newest]


def _lost(url: str, key: StepKey, why: str) -> VerifyReport:
    return VerifyReport(
        url=url, published=False, ok=False, step=key.step, fingerprint=key.fingerprint, files=[], message=why
    )


def _alert(ledger: Ledger, key: StepKey, found: VerifyReport) -> Alert:
    wrong = [f"{check.name}: {check.message}" for check in found.files if check.problem]
    wrong += [f"{tensor.artifact}: {tensor.name}: {tensor.message}" for tensor in found.wrong_tensors]
    return Alert(
        run=ledger.run,
        step=key.step,
        fingerprint=key.fingerprint,
        problem=PROBLEM,
        what=plain("; ".join([found.message, *wrong[:3]])),
        where=found.url,
        since=timestamp(ledger.clock()),
        command=typed("ckpt", "verify", found.url),
        advice="Do not load it. Restore the files from the bucket's versions, or point the alias at another "
        "step: ckpt publish --alias latest PUBLISHED_URL",
    )
