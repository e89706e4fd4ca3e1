"""The page of runs: which steps are safe, which is latest, what is wrong, what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flows.report.document import Fact, Verdict, document, minute
from flows.report.run_charts import StepChart, step_charts
from flows.report.runs import RunFacts, RunsFacts, StepFact
from flows.text import human_age, human_bytes, human_seconds, plural

Link = Callable[[StepFact], str | None]
"""Where the page of a published step is, relative to this page; None if it cannot be linked."""

_WORDS = {"done": "ok", "failed": "failed", "open": "–"}


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
        tone=_tone,
    )


def verdict_of(run: RunFacts) -> Verdict:
    """Whether the run is well, and which step to resume from."""
    if run.error:
        return Verdict("bad", "Not readable", run.error)
    if not run.steps:
        return Verdict("calm", "No steps", "Nothing was saved yet.")
    resume = f"Resume from {run.latest.name}." if run.latest else "No step is published yet."
    if run.troubles:
        stalled = any(trouble.problem == "stalled" for trouble in run.troubles)
        said = "; ".join(trouble.what or trouble.problem for trouble in run.troubles)
        return Verdict("warn", "Stalled" if stalled else "Look at it", f"{said}. {resume}")
    wrong = sum(run.counts.get(state, 0) for state in ("problem", "failing"))
    if wrong:
        return Verdict(
            "warn",
            "Look at it",
            f"{plural(wrong, 'step')} of {sum(run.counts.values()):,} cannot be trusted. {resume}",
        )
    return Verdict("good", "Healthy", resume)


def _summary(run: RunFacts) -> list[Fact]:
    total = sum(run.counts.values())
    safe = run.counts.get("published", 0)
    wrong = sum(run.counts.get(state, 0) for state in ("problem", "failing"))
    open_ = total - safe - wrong
    pending = [
        f"{count} {state}"
        for state, count in run.counts.items()
        if state not in ("published", "problem", "failing")
    ]
    latest = run.latest
    return [
        ("Latest", latest.name if latest else "none", minute(latest.saved) if latest else ""),
        ("Safe steps", f"{safe:,} of {total:,}", "validated, test-loaded, published"),
        ("With a problem", f"{wrong:,}", "listed below" if wrong else ""),
        *([("Not done yet", f"{open_:,}", ", ".join(pending[:4]))] if open_ else []),
        ("Stored by the job", human_bytes(run.source_bytes), plural(total, "step")),
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
