"""The page of runs: which steps are safe, which is latest, what is wrong, what it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flows.report.document import Fact, Verdict, document, minute
from flows.report.run_charts import StepChart, step_charts
from flows.report.runs import RunFacts, RunsFacts, StepFact
from flows.text import human_age, human_bytes, human_seconds, plural

Link = Callable[[StepFact], str | None]
"""Where the page of a published step is, relative to this page; None if it cannot be linked."""

_WORDS = {"done": "ok", "failed": "failed", "open": "–"}
_ALERTS = {
    "delivered": "delivered",
    "partly": "not delivered to all",
    "failed": "not delivered",
    "sending": "being told",
}
_DUE = ("in-progress", "waiting", "writing")
"""States that a pass will change by itself."""
_ASIDE = ("late", "replaced", "deleting", "retired", "gone")
_LEFT = {"replaced": "was saved over since", "deleting": "is being deleted"}


@dataclass(frozen=True, slots=True)
class RunView:
    """What the template shows of a run."""

    it: RunFacts
    verdict: Verdict
    summary: list[Fact]
    charts: tuple[StepChart, ...]


def render_runs(facts: RunsFacts, link: Link) -> str:
    """The page of all runs; steps lead to their own pages by ``link``."""
    return document(
        "runs.html",
        title=f"{facts.title}: report",
        made=facts.made,
        heading=facts.title,
        runs=[RunView(run, verdict_of(run), _summary(run), step_charts(run.steps)) for run in facts.runs],
        link=link,
        word=lambda state: _WORDS.get(state, state),
        outcomes=_ALERTS,
        tone=_tone,
    )


def verdict_of(run: RunFacts) -> Verdict:
    """Whether the run is well, and which step to resume from."""
    if run.error:
        return Verdict("bad", "Not readable", run.error)
    if not run.steps:
        return Verdict("calm", "No steps", "Nothing was saved yet.")
    resume = _resume(run)
    told = [trouble.what or trouble.problem for trouble in run.troubles]
    if run.stalled and not any(trouble.problem == "stalled" for trouble in run.troubles):
        # Nobody watches, or the next pass is still to come.
        told.insert(0, f"Nothing was committed for {human_age(run.quiet or 0)}")
    if told:
        stalled = run.stalled or any(trouble.problem == "stalled" for trouble in run.troubles)
        return Verdict("warn", "Stalled" if stalled else "Look at it", f"{'; '.join(told)}. {resume}")
    wrong, proven = _count(run, "problem", "failing"), _count(run, "published")
    if wrong:
        said = f"{plural(wrong, 'step')} of {_total(run):,} cannot be trusted. {resume}"
        return Verdict("warn", "Look at it", said) if proven else Verdict("bad", "No safe step", said)
    return Verdict("good", "Healthy", resume) if proven else Verdict("calm", "Nothing proven", resume)


def _resume(run: RunFacts) -> str:
    """Which step to resume from: that of ``latest``, unless its bytes are not in the source any more."""
    standing = [step for step in run.safe if step.bytes]
    newest = standing[-1] if standing else None
    latest = run.latest
    if latest is None:
        return f"Resume from {newest.name}." if newest else "No step is published yet."
    if latest in standing:
        return f"Resume from {latest.name}."
    gone = f"{latest.name}, the latest, {_LEFT.get(latest.state, 'is no longer in the bucket')}"
    return f"{gone}: " + (f"resume from {newest.name}." if newest else "only what was published is left.")


def _count(run: RunFacts, *states: str) -> int:
    return sum(run.counts.get(state, 0) for state in states)


def _total(run: RunFacts) -> int:
    """Steps, each once."""
    return sum(run.counts.values()) - _count(run, "replaced")


def _by_state(run: RunFacts, states: Sequence[str]) -> tuple[str, str]:
    """How many steps are in these states, and how many in each."""
    found = [(run.counts[state], state) for state in states if run.counts.get(state)]
    return f"{sum(count for count, _ in found):,}", ", ".join(f"{count:,} {state}" for count, state in found)


def _summary(run: RunFacts) -> list[Fact]:
    safe, wrong = _count(run, "published"), _count(run, "problem", "failing")
    due, aside = _by_state(run, _DUE), _by_state(run, _ASIDE)
    latest = run.latest
    return [
        ("Latest", latest.name if latest else "none", minute(latest.saved) if latest else ""),
        ("Safe steps", f"{safe:,} of {_total(run):,}", "validated, test-loaded, published"),
        ("With a problem", f"{wrong:,}", "listed below" if wrong else ""),
        *([("Not done yet", *due)] if due[1] else []),
        *([("Left aside", *aside)] if aside[1] else []),
        ("Stored by the job", human_bytes(run.source_bytes), plural(run.standing, "step")),
        (
            "Published",
            human_bytes(run.published_bytes),
            f"in {human_seconds(run.seconds)} of work" if run.seconds else "",
        ),
        (
            "Saves",
            "unknown" if run.usual_interval is None else f"every {human_seconds(run.usual_interval)}",
            "" if run.quiet is None else f"the last {human_age(run.quiet)} ago",
        ),
    ]


def _tone(step: StepFact) -> str:
    return {"published": "good", "problem": "bad", "failing": "warn"}.get(step.state, "calm")
