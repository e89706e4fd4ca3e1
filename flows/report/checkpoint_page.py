"""The page of one checkpoint."""

from __future__ import annotations

import shlex

from flows.report.checkpoint import CheckpointFacts
from flows.report.checkpoint_charts import load_chart, rank_chart
from flows.report.document import Fact, Verdict, document, minute
from flows.text import human_bytes, human_seconds, plural


def render_checkpoint(facts: CheckpointFacts) -> str:
    """The page of one checkpoint."""
    loads = [(part, load_chart(part)) for part in facts.loads.parts]
    return document(
        "checkpoint.html",
        title=f"{facts.name}: {verdict_of(facts).word}",
        data=None if facts.contents is None else facts.contents.document(),
        made=facts.made,
        it=facts,
        verdict=verdict_of(facts),
        summary=_summary(facts),
        sections=_sections(facts),
        clean="Nothing wrong was found." if facts.ok else "No finding explains it.",
        contents_line=_contents_line(facts),
        writers_line=_writers_line(facts),
        ranks=rank_chart(facts.shares),
        costs=_costs(facts),
        loads=loads,
        values_line=_values_line(facts),
        scrub_command=f"ckpt report --scrub {shlex.quote(facts.url)}",
        published=facts.published,
    )


def verdict_of(facts: CheckpointFacts) -> Verdict:
    """Whether it can be resumed, in a word and a sentence."""
    read = (
        "Every byte was read." if facts.scrubbed else "Index and listing were checked, the elements not read."
    )
    if facts.state == "writing":
        return Verdict("calm", "Being written", "It is too early to judge.")
    if facts.state == "incomplete":
        return Verdict(
            "bad", "Incomplete", "The save did not finish: there is no index. Do not resume from it."
        )
    if facts.state == "not-dcp":
        return Verdict("bad", "No DCP checkpoint", "It is something else.")
    if facts.state == "torn":
        return Verdict(
            "bad", "Torn", "What the index refers to is missing, short or newer. Do not resume from it."
        )
    if not facts.ok:
        return Verdict("bad", "Do not resume", f"{plural(facts.errors, 'error')} in it. {read}")
    if facts.warnings:
        return Verdict("warn", "Safe to resume", f"{plural(facts.warnings, 'warning')} to know of. {read}")
    return Verdict("good", "Safe to resume", read)


def _summary(facts: CheckpointFacts) -> list[Fact]:
    totals = facts.totals
    ranks = len(facts.shares.ranks)
    return [
        ("Size", human_bytes(totals.file_bytes), plural(totals.files, "file")),
        (
            "Keys",
            f"{totals.keys:,}",
            f"{plural(totals.tensors, 'tensor')}, {plural(totals.objects, 'object')}",
        ),
        ("Chunks", f"{totals.chunks:,}", human_bytes(totals.bytes) + " in memory"),
        ("Written by", plural(ranks, "rank") if ranks else "unknown", facts.producer),
        ("Last change", minute(facts.changed) or "unknown", ""),
        ("Fingerprint", facts.fingerprint[:8], facts.fingerprint[8:24] + "…"),
    ]


def _sections(facts: CheckpointFacts) -> list[tuple[str, str]]:
    found = [("findings", "Findings"), ("keys", "Contents"), ("writers", "Writers"), ("cost", "Cost")]
    found += [("values", "Values"), ("published", "Published")]
    absent = {"keys"} if facts.contents is None else set()
    absent |= set() if facts.published else {"published"}
    return [(anchor, label) for anchor, label in found if anchor not in absent]


def _contents_line(facts: CheckpointFacts) -> str:
    totals = facts.totals
    return (
        f"{plural(totals.keys, 'key')}: {plural(totals.tensors, 'tensor')} "
        f"in {plural(totals.chunks, 'chunk')} and {plural(totals.objects, 'object')}, "
        f"{human_bytes(totals.bytes)}. "
        "Choose a key to see how it is cut and who wrote which part."
    )


def _writers_line(facts: CheckpointFacts) -> str:
    shares = facts.shares
    if not shares.ranks:
        return "The names of its files do not tell which ranks wrote them."
    if len(shares.ranks) == 1:
        return f"Rank {shares.ranks[0].rank} wrote all of it: {human_bytes(shares.mean)}."
    heaviest = shares.heaviest
    assert heaviest is not None
    each = f"{plural(len(shares.ranks), 'rank')} wrote {human_bytes(shares.mean)} each on average"
    if facts.contents is None:
        # How much each would have written in the end is not known.
        return f"{each}, by the names of the files."
    if shares.even:
        return f"{each}, evenly: the heaviest {human_bytes(heaviest.bytes)}."
    return (
        f"{each}, unevenly: rank {heaviest.rank} wrote {human_bytes(heaviest.bytes)}, "
        f"{shares.imbalance:.1f} times the mean, so every save waits for it."
    )


def _costs(facts: CheckpointFacts) -> list[Fact]:
    found: list[Fact] = [
        ("Storage", human_bytes(facts.totals.file_bytes), plural(facts.totals.files, "object"))
    ]
    if facts.export is not None:
        found += [
            (
                "Export to one file",
                human_bytes(facts.export.bytes),
                f"about {human_seconds(facts.export.seconds)}",
            ),
            ("Memory of an export", human_bytes(facts.export.memory), "at most, by default"),
        ]
    if len(facts.loads.parts) == 1:
        costs = facts.loads.parts[0].costs
        eight = next((each for each in costs if each.ranks == 8), costs[-1])
        found.append(
            (
                f"Load on {plural(eight.ranks, 'rank')}",
                human_bytes(eight.read),
                f"slowest {human_bytes(eight.slowest)}",
            )
        )
    return found


def _values_line(facts: CheckpointFacts) -> str:
    health = facts.health
    if health is None:
        return ""
    said = [f"{plural(health.tensors, 'tensor')} read"]
    said.append(f"{health.nonfinite:,} with NaN or infinity" if health.nonfinite else "no NaN, no infinity")
    if health.zeros:
        said.append(f"{health.zeros:,} all zero")
    if health.unchanged:
        said.append(f"{health.unchanged:,} unchanged since the compared step")
    return ", ".join(said) + "."
