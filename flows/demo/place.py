"""The directory of a demo: what lies where in it, and what has been done in it already.

`demo.json` marks the directory as a demo's own. Only a directory so marked is ever changed, and its training
bucket is trained anew only as long as the mark does not say that training and damage are complete.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from pydantic import BaseModel, ValidationError

from dcp.errors import UsageError


class SavedStep(BaseModel):
    """What the training script prints of a saved step: the ranks' mean loss after ``step`` steps."""

    step: int
    loss: float


class BrokenStep(BaseModel):
    """One step that was broken on purpose, and how."""

    step: int
    what: str


class Mark(BaseModel):
    """`demo.json`. ``trained`` once the bucket is complete, broken steps included."""

    trained: bool = False
    saved: list[SavedStep] = []
    broken: list[BrokenStep] = []


@dataclass(frozen=True, slots=True)
class Place:
    """Absolute paths of one demo."""

    root: Path

    @property
    def run(self) -> Path:
        """The training bucket's run: its directories are the steps."""
        return self.root / "bucket" / "run"

    @property
    def settings(self) -> Path:
        return self.root / "lifecycle.toml"

    @property
    def published(self) -> Path:
        return self.root / "published"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def training_log(self) -> Path:
        return self.root / "training.log"

    @property
    def _mark(self) -> Path:
        return self.root / "demo.json"

    def prepare(self) -> Mark:
        """Make the directory, or see how far an earlier demo got in it.

        Raises:
            UsageError: it holds something else.
        """
        if not self.root.exists():
            self.root.mkdir(parents=True)
        elif not self.root.is_dir():
            raise UsageError(f"{self.root} is a file; name a directory: ckpt demo DIR")
        elif not self._mark.exists() and any(self.root.iterdir()):
            raise UsageError(f"{self.root} holds something else; name another directory: ckpt demo DIR")
        mark = self._read() if self._mark.exists() else Mark()
        self.keep(mark)
        if not self.settings.exists():
            template = files("flows.demo") / "templates" / "lifecycle.toml"
            self.settings.write_text(template.read_text(encoding="utf-8"), encoding="utf-8")
        return mark

    def _read(self) -> Mark:
        try:
            return Mark.model_validate_json(self._mark.read_bytes())
        except ValidationError:
            raise UsageError(f"{self._mark} is not what a demo wrote; name another directory") from None

    def keep(self, mark: Mark) -> None:
        """Write ``mark`` whole."""
        text = mark.model_dump_json(indent=2) + "\n"
        if self._mark.exists() and self._mark.read_text() == text:
            return
        aside = self._mark.with_suffix(".new")
        aside.write_text(text)
        aside.replace(self._mark)

    def clear_run(self) -> bool:
        """Remove what an interrupted training left; whether there was anything."""
        if not self.run.exists():
            return False
        shutil.rmtree(self.run)
        return True

    @contextmanager
    def alone(self) -> Iterator[int]:
        """Keep a second demo out of the directory, and yield the file descriptor that does.

        It does so until every process that has the descriptor has ended, also one whose parent was killed.

        Raises:
            UsageError: a demo, or the training of one that was killed, is at work.
        """
        with (self.root / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"another demo is at work in {self.root}; wait until it ends") from None
            yield lock.fileno()
