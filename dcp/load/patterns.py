"""Globs on keys that remember what their stars stood for. Pure functions on names.

``*`` stands for any text, dots included, and ``?`` for one character. `Pattern.expand` puts what the stars
of a match stood for into another text's stars, in order, so that one rule names the partners of many keys:
``"*.qkv.weight"`` matches ``"layers.0.qkv.weight"``, and ``"*.q.weight"`` then means ``"layers.0.q.weight"``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from dcp.errors import UsageError


@dataclass(frozen=True)
class Pattern:
    """A glob on whole keys."""

    text: str

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        parts = {"*": "(.*)", "?": "(.)"}
        return re.compile("".join(parts.get(c) or re.escape(c) for c in self.text), re.DOTALL)

    def match(self, key: str) -> tuple[str, ...] | None:
        """What each ``*`` and ``?`` stands for if the pattern is ``key``'s, else None."""
        found = self._regex.fullmatch(key)
        return None if found is None else found.groups()

    def expand(self, stars: Sequence[str]) -> str:
        """This text with ``stars`` in the place of its own stars.

        Raises:
            UsageError: it has another number of stars.
        """
        pieces = re.split(r"[*?]", self.text)
        if len(pieces) - 1 != len(stars):
            raise UsageError(
                f"{self.text!r} has {len(pieces) - 1} stars where its partner has {len(stars)}: "
                "each star stands for the text that the partner's star met, so give as many"
            )
        return "".join(piece + star for piece, star in zip(pieces, [*stars, ""], strict=True))


def matches_any(patterns: Iterable[Pattern], key: str) -> bool:
    """Whether one of the patterns is the key's."""
    return any(pattern.match(key) is not None for pattern in patterns)
