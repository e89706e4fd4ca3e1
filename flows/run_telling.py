"""What people are told of a run as a whole: it stopped saving, junk piles up, a setting does not fit, what is
published lacks tensors.

Each is told once for as long as it is the same problem (its `StepKey` under `RUN`), and once more when it is
over.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dcp.sizes import human_bytes, human_span
from dcp.storage import join_url
from flows.reaching import PROBLEM
from flows.settings import LifecycleSettings, RunSettings
from flows.survey import RunSurvey
from tasks.alert import Alert, AlertReport, Emit, raise_alert
from tasks.ledger import Ledger, StepKey, timestamp
from tasks.partial import RECORD as PARTIAL
from tasks.partial import Shortfall, identity
from tasks.run_health import Junk, Stall, run_key
from tasks.text import plain, typed

_NAMES = 5
_HEADLINES = {
    "stalled": "saves again",
    "junk": "has no junk any more",
    "settings": "its settings fit again",
    PARTIAL: "publishes all tensors again",
    PROBLEM: "its storage can be reached again",
}


def tell_run(
    settings: LifecycleSettings,
    found: RunSurvey,
    recovered: tuple[StepKey, ...],
    emit: Emit | None,
    *,
    new: bool = True,
) -> list[AlertReport]:
    """Tell what `survey_run` found of the run itself.

    Args:
        settings: whose alert URLs take it.
        found: the run, with problems that were never told.
        recovered: problems that were told and are over.
        emit: emits Prefect events.
        new: whether the former are to be told as well.

    Raises:
        StorageError: the ledger failed.
    """
    run, ledger = found.run, found.ledger
    sinks = settings.alert_urls(run)
    told = []
    for problem in found.to_tell if new else ():
        if isinstance(problem, Stall):
            alert, facts = _stalled(settings, run, problem), {"last": problem.last.at}
        else:
            alert, facts = _junk(settings, run, problem), {}
        told.append(raise_alert(ledger, problem.key, alert, sinks=sinks, emit=emit, facts=facts))
    told += [
        raise_alert(ledger, key, _recovered(settings, run, ledger, key), sinks=sinks, emit=emit)
        for key in recovered
    ]
    return told


def tell_mistake(
    settings: LifecycleSettings, run: RunSettings, ledger: Ledger, mistake: str, step: str, emit: Emit | None
) -> AlertReport:
    """Tell that a setting does not fit a step, once for all steps that it does not fit in the same way."""
    # What differs from step to step, its name and sizes, makes no other mistake of it.
    same = re.sub(r"\d+", "", mistake.replace(step, ""))
    alert = Alert(
        run=run.name,
        step="",
        fingerprint="",
        problem="settings",
        headline="a setting does not fit its steps",
        what=plain(mistake),
        where=join_url(run.source, step),
        since=timestamp(ledger.clock()),
        command=typed("ckpt", "run", join_url(run.source, step), "--config", settings.file),
        advice="The step was left alone. Correct the setting; the next pass then takes it up by itself.",
    )
    sinks = settings.alert_urls(run)
    return raise_alert(ledger, run_key("settings", same), alert, sinks=sinks, emit=emit)


def tell_partial(
    settings: LifecycleSettings,
    run: RunSettings,
    ledger: Ledger,
    lacking: Sequence[Shortfall],
    published: str,
    emit: Emit | None,
) -> AlertReport:
    """Tell that what is published lacks tensors: once for all steps that lack the same, until one does not.

    Raises:
        StorageError: the ledger failed.
    """
    same, number = identity(lacking), 1
    while "alerted-recovered" in ledger.stages(key := run_key(PARTIAL, same, str(number))):
        number += 1
    alert = Alert(
        run=run.name,
        step="",
        fingerprint="",
        problem=PARTIAL,
        headline="publishes steps that lack some of their tensors",
        what=plain("; ".join(shortfall.text for shortfall in lacking)),
        where=published,
        since=timestamp(ledger.clock()),
        command=typed("ckpt", "status", "--run", run.name, "--config", settings.file),
        advice="The step is published, and what is in its files is whole. If they are to hold the rest too, "
        f"choose another format or dtype in {settings.field(run, 'exports')}; if not, name it under exclude "
        "there, which ends these alerts. Steps that lack the same are not told again.",
    )
    return raise_alert(ledger, key, alert, sinks=settings.alert_urls(run), emit=emit)


def _stalled(settings: LifecycleSettings, run: RunSettings, stall: Stall) -> Alert:
    return Alert(
        run=run.name,
        step="",
        fingerprint="",
        problem="stalled",
        headline=f"saves no more: nothing for {human_span(stall.quiet)} after {stall.last.step}",
        what=f"no commit for {human_span(stall.quiet)}; usual between two is {human_span(stall.usual)}",
        where=join_url(run.source, stall.last.step),
        since=timestamp(stall.last.at),
        command=typed("ckpt", "status", "--run", run.name, "--config", settings.file),
        advice="Look at the training job. If it has ended as it should, nothing is left to do; "
        f"{settings.field(run, 'stall_factor')} = 0 ends these alerts for the run.",
    )


def _junk(settings: LifecycleSettings, run: RunSettings, junk: Junk) -> Alert:
    more = f" and {len(junk.steps) - _NAMES} more" if len(junk.steps) > _NAMES else ""
    names = ", ".join(junk.steps[:_NAMES])
    return Alert(
        run=run.name,
        step="",
        fingerprint="",
        problem="junk",
        headline=f"has {human_bytes(junk.bytes)} of junk in {len(junk.steps)} uncommitted steps",
        what=plain(f"{human_bytes(junk.bytes)} in steps that were never committed: {names}{more}"),
        where=run.source,
        since=timestamp(junk.since),
        command=typed("ckpt", "status", "--run", run.name, "--config", settings.file),
        advice="Once the job is sure not to write them any more, delete these directories.",
    )


def _recovered(settings: LifecycleSettings, run: RunSettings, ledger: Ledger, key: StepKey) -> Alert:
    before = ledger.read(key, "alerted")
    problem = str(before.facts.get("problem"))
    return Alert(
        run=run.name,
        step="",
        fingerprint="",
        problem="recovered",
        headline=_HEADLINES.get(problem, f"{problem} is over"),
        what=plain(f"told before, at {before.when}: {before.facts.get('headline')}"),
        where=run.source,
        since=timestamp(ledger.clock()),
        command=typed("ckpt", "status", "--run", run.name, "--config", settings.file),
    )
