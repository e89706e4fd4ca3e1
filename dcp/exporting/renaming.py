"""Rules that rename keys, ``REGEX=>TEXT``: checked when they are given, applied within bounded time.

Python's regular expressions can take exponential time, and nothing in the same process can stop them. A
rule that leaves a choice in more than one place, or that meets very long names, is therefore applied by a
process of its own, which can be ended.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence

from dcp.errors import UsageError

Rule = tuple[str, str]
"""Regular expression and replacement, as `re.sub` takes them."""

SECONDS = 20.0
"""How long the rules of one export may take."""

_LONG = 4096
"""From this many letters on a name is slow for one repetition too."""
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_CHOICE = re.compile(r"[*+|]|(?<!\()\?|\{\d*,?\d*\}")
"""Repetitions and alternatives, where nothing is escaped."""
_APART = """
import json, re, sys
rules, names = json.load(sys.stdin)
for rule in rules:
    names = [re.sub(*rule, name) for name in names]
json.dump(names, sys.stdout)
"""


def parse_rename(text: str) -> Rule:
    """``REGEX=>TEXT`` as a rule.

    Raises:
        UsageError: it has no ``=>``, the expression is empty or does not compile, or the replacement speaks
            of groups that the expression does not have.
    """
    pattern, mark, replacement = text.partition("=>")
    if not mark:
        raise UsageError(f"rename {text!r} has no '=>'; write 'REGEX=>TEXT', e.g. '^module\\.=>'")
    if not pattern:
        raise UsageError(f"rename {text!r}: nothing before '=>' matches everywhere; '^=>TEXT' adds a prefix")
    try:
        compiled = re.compile(pattern)
        # An empty alternative lets it match, and a replacement is checked by nothing but a match.
        end = "\n|" if compiled.flags & re.VERBOSE else "|"
        match = re.compile(pattern + end).match("")
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"rename {text!r}: {pattern!r} is no regular expression: {error}") from None
    assert match is not None
    try:
        match.expand(replacement)
    except (re.error, IndexError) as error:
        raise UsageError(f"rename {text!r}: the replacement {replacement!r} is wrong: {error}") from None
    return pattern, replacement


def renamed(names: Sequence[str], rules: Sequence[Rule]) -> list[str]:
    """The names after all rules, one after the other.

    Raises:
        UsageError: they take too long.
    """
    most = 0 if max(map(len, names), default=0) > _LONG else 1
    if any(len(_CHOICE.findall(_ESCAPED.sub("", pattern))) > most for pattern, _ in rules):
        return _apart(names, rules)
    result = list(names)
    for pattern, replacement in rules:
        result = [re.sub(pattern, replacement, name) for name in result]
    return result


def _apart(names: Sequence[str], rules: Sequence[Rule]) -> list[str]:
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _APART],
            input=json.dumps([list(rules), list(names)]).encode(),
            stdout=subprocess.PIPE,
            timeout=SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        told = ", ".join(repr(f"{pattern}=>{replacement}") for pattern, replacement in rules)
        raise UsageError(
            f"renaming takes longer than {SECONDS:g} s: in {told} repetitions or alternatives match one text "
            f"in many ways; make them unambiguous, as [^.]+ for one component"
        ) from None
    result: list[str] = json.loads(done.stdout)
    return result
