"""The small real checkpoints in tests/data/golden; its README says what each one is."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1] / "data" / "golden"

SAVED_AT = 1_700_000_000
"""The time (seconds since 1970) that the data files of a copy carry; `.metadata` is a second younger."""


@dataclass(frozen=True, slots=True)
class Golden:
    """One row of the README. `ranks` is how many saved it."""

    name: str
    place: str
    ranks: int

    @property
    def directory(self) -> Path:
        """The checkpoint itself. Read only: tests that write take a copy."""
        return ROOT / self.place

    @property
    def expected(self) -> Path | None:
        """A `torch.save` file: flat dict from the checkpoint's keys to full values. None if it is no DCP."""
        path = ROOT / f"{self.name}.expected.pt"
        return path if path.exists() else None


def _rows() -> tuple[Golden, ...]:
    lines = (ROOT / "README.md").read_text().splitlines()
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][2:]
    return tuple(Golden(name=row[0], place=row[1], ranks=int(row[4])) for row in table)


GOLDENS = _rows()
"""Every checkpoint, in the README's order."""


def find(name: str) -> Path:
    """The directory of the golden called `name`, or of a step of several parts such as `accelerate_fsdp2`."""
    by_name = {golden.name: golden.directory for golden in GOLDENS}
    directory = by_name.get(name, ROOT / name)
    if not directory.is_dir():
        raise LookupError(f"no golden called {name!r}; there are {', '.join(by_name)}")
    return directory


def copy(name: str, target: Path) -> Path:
    """Copy a golden to `target` with the times of a fresh save: all alike, `.metadata` last."""
    shutil.copytree(find(name), target)
    for path in (target, *target.rglob("*")):
        at = SAVED_AT + (1 if path.name.endswith(".metadata") else 0)
        os.utime(path, (at, at))
    return target
