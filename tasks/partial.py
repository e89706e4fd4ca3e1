"""What published files lack of a step's tensors: no reason not to publish, but one to tell people.

`shortfalls` finds it among an export's findings: tensors that a format cannot hold and so are left out, and
numbers that became infinite in a cast. A step that has any gets the record ``partial``. What is left out with
``exclude`` in the settings was not asked for and is none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dcp.findings import Finding
from tasks.manifest import Artifact

RECORD = "partial"


@dataclass(frozen=True, slots=True)
class Shortfall:
    """What one artifact lacks: ``absent`` tensors, and ``infinite`` ones; at least one of either."""

    artifact: str
    absent: tuple[Finding, ...]
    infinite: tuple[Finding, ...]

    @property
    def text(self) -> str:
        """It in words."""
        said = []
        if self.absent:
            said.append(f"{_tensors(self.absent)} left out, as {self.absent[0].message}")
        if self.infinite:
            said.append(
                f"{_tensors(self.infinite)} with numbers turned infinite, as {self.infinite[0].message}"
            )
        return f"{self.artifact}: {'; '.join(said)}"


def shortfalls(artifacts: Iterable[Artifact]) -> list[Shortfall]:
    """What each artifact lacks; those that lack nothing are not among them."""
    found = []
    for artifact in artifacts:
        absent = tuple(
            f
            for f in artifact.findings
            if f.code == "export.skipped-object" and f.severity == "warning" and f.detail.get("tensor")
        )
        infinite = tuple(f for f in artifact.findings if f.code == "export.overflow")
        if absent or infinite:
            found.append(Shortfall(artifact.name, absent, infinite))
    return found


def identity(found: Sequence[Shortfall]) -> str:
    """The same for steps that lack the same: which numbers are too large differs from step to step."""
    what = [(s.artifact, sorted(f.key or "" for f in s.absent), bool(s.infinite)) for s in found]
    return hashlib.sha256(repr(sorted(what)).encode("utf-8", "surrogateescape")).hexdigest()


def _tensors(found: Sequence[Finding]) -> str:
    return "1 tensor" if len(found) == 1 else f"{len(found):,} tensors"
