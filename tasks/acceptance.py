"""Accepted keys: a person says that a step's keys, though not those of the step before, are meant.

``.ledger/.accepted/<number>/<step>/<fingerprint>.json`` is created once. The step is then not held against
earlier ones, and later steps are held against it. Steps that were found bad for their keys before are judged
again: each such failure names the acceptance in force at the time (`Accepted.basis`), and another one is
in force now.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from dcp.errors import NotFoundError
from dcp.storage import ObjectInfo, is_safe_name
from tasks.ledger import Ledger, StepKey, create_once

PREFIX = ".accepted/"

_NAME = re.compile(
    r"\.accepted/(?P<number>\d{1,18})/(?P<step>[^/]+)/(?P<fingerprint>[0-9a-f]{64})\.json", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Accepted:
    """Every acceptance of a run: numbers and keys of steps, in order."""

    steps: tuple[tuple[int, StepKey], ...] = ()

    @classmethod
    def among(cls, objects: Iterable[ObjectInfo]) -> Accepted:
        """The acceptances among the objects of a ledger."""
        matches = (_NAME.fullmatch(info.name) for info in objects)
        steps = ((int(m["number"]), StepKey(m["step"], m["fingerprint"])) for m in matches if m)
        return cls(tuple(sorted(steps)))

    def __contains__(self, key: StepKey) -> bool:
        return any(key == accepted for _, accepted in self.steps)

    def basis(self, number: int) -> str:
        """Fingerprint of the last accepted step up to ``number``; empty if there is none."""
        return next((key.fingerprint for n, key in reversed(self.steps) if n <= number), "")


def accepted_keys(ledger: Ledger) -> Accepted:
    """Every acceptance, from one listing of those alone."""
    try:
        found = ledger.store.child(PREFIX.rstrip("/")).objects()
    except NotFoundError:
        return Accepted()
    return Accepted.among(
        ObjectInfo(f"{PREFIX}{info.name}", info.size, info.modified, info.identity) for info in found
    )


def accept(ledger: Ledger, key: StepKey, number: int) -> bool:
    """Record that the keys of these bytes are meant. False if that was recorded before."""
    name = f"{PREFIX}{number}/{key.step}/{key.fingerprint}.json"
    if not is_safe_name(name) or _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} cannot name an acceptance")
    return create_once(ledger.store, name, ledger.record(key, "accepted", {"number": number}))
