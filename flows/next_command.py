"""The command that shows a step's failure again: what people are told to type must not answer ok.

A run's settings decide how its steps are judged, and the commands about one checkpoint know nothing of them.
So the command says them as options, wherever the settings are not what the command does by itself.
"""

from __future__ import annotations

import shlex

from dcp.validation import GRACE_SECONDS
from flows.settings import RunSettings
from tasks.ledger import Failure


def shown_again_by(run: RunSettings, url: str, failure: Failure) -> str:
    """The command that judges the step at ``url`` as ``run`` did; empty where no such command could."""
    if not failure.final:
        return ""
    if failure.problem == "test-load":
        words = ["ckpt", "test-load"]
        words += [word for layout in run.layouts for word in ("--layout", layout)]
        if run.tp_rules is not None:
            words += ["--tp-rules", run.tp_rules]
    elif failure.stage == "validate" or failure.problem == "torn":
        words = ["ckpt", "validate", *_expectation(run, failure)]
        # Keys stand in the index: a fault in them needs no reading of the data.
        if run.scrub and failure.problem != "key-mismatch":
            words.append("--scrub")
        if run.copied:
            words.append("--copied")
        if failure.problem == "incomplete" and run.grace_period < GRACE_SECONDS:
            words += ["--grace-period", f"{run.grace_period:g}s"]
    else:
        return ""
    words += [word for name in run.allow_classes for word in ("--allow", name)]
    return shlex.join([*words, url])


def _expectation(run: RunSettings, failure: Failure) -> list[str]:
    """What the keys are held against, where it is they that are wrong."""
    if not any(code.startswith("keys.") for code in failure.codes):
        return []
    words = []
    if failure.expected:
        words += ["--against", failure.expected]
    elif run.expectation not in ("previous", "none"):
        words += ["--contract", run.expectation]
    if "ignore_keys" in run.model_fields_set:
        # No option says an empty list; an empty glob matches no key.
        words += [word for glob in run.ignore_keys or ("",) for word in ("--ignore", glob)]
    return words
