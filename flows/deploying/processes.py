"""Daemons of a local deployment: started apart from the terminal, found again by their pids, ended for good.

Each has a file that names its pid and when it started, since a pid alone may belong to somebody else by now,
and a log. It leads a process group of its own, so ending it ends what it started too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import BaseModel, ValidationError

PATIENCE = 15.0
"""Seconds that a daemon has to end itself."""


class Mark(BaseModel):
    """The file of one daemon. ``started`` is in seconds since the epoch."""

    pid: int
    started: float
    command: list[str]


@dataclass(frozen=True, slots=True)
class Daemons:
    """The daemons whose files stand in ``directory``."""

    directory: Path

    def log(self, name: str) -> Path:
        """Where a daemon's output goes."""
        return self.directory / f"{name}.log"

    def names(self) -> list[str]:
        """Every daemon that was started and not ended by us."""
        return sorted(file.stem for file in self.directory.glob("*.json"))

    def alive(self, name: str, command: Sequence[str] | None = None) -> bool:
        """Whether a daemon runs; with ``command``, whether it is this one that it runs."""
        mark = self._mark(name)
        if mark is None or (command is not None and list(command) != mark.command):
            return False
        return _process(mark) is not None

    def start(self, name: str, command: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> None:
        """Start a daemon; one of the same name is ended first."""
        self.stop([name])
        self.directory.mkdir(parents=True, exist_ok=True)
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                list(command),
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started = psutil.Process(process.pid).create_time()
        mark = Mark(pid=process.pid, started=started, command=list(command))
        aside = self.directory / f".{name}.new"
        aside.write_text(mark.model_dump_json())
        aside.replace(self._file(name))

    def stop(self, names: Sequence[str]) -> list[str]:
        """End daemons together, and everything in their process groups; names of those that ran."""
        ended: list[str] = []
        groups: set[int] = set()
        for name in names:
            mark = self._mark(name)
            if mark is None:
                continue
            if _process(mark) is not None:
                ended.append(name)
                groups.add(mark.pid)
            elif not _recycled(mark) and _members(mark.pid, mark.started):
                # The leader died and left what it had started; while that lives nobody is given its pid.
                groups.add(mark.pid)
        deadline = time.monotonic() + PATIENCE
        for number in (signal.SIGTERM, signal.SIGKILL):
            for group in groups:
                _signal(group, number)
            while groups and (number == signal.SIGKILL or time.monotonic() < deadline):
                groups = {group for group in groups if _members(group, 0.0)}
                time.sleep(0.05)
        for name in names:
            self._file(name).unlink(missing_ok=True)
        return ended

    def _file(self, name: str) -> Path:
        return self.directory / f"{name}.json"

    def _mark(self, name: str) -> Mark | None:
        try:
            return Mark.model_validate_json(self._file(name).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None


def _process(mark: Mark) -> psutil.Process | None:
    try:
        process = psutil.Process(mark.pid)
        same = abs(process.create_time() - mark.started) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if same else None


def _recycled(mark: Mark) -> bool:
    """Whether the pid is another process's by now."""
    try:
        return abs(psutil.Process(mark.pid).create_time() - mark.started) >= 1.0
    except psutil.NoSuchProcess:
        return False


def _members(group: int, since: float) -> bool:
    """Whether anything lives in a process group that was made at ``since`` or later."""
    for process in psutil.process_iter():
        try:
            if (
                os.getpgid(process.pid) == group
                and process.create_time() >= since - 1.0
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                return True
        except (psutil.Error, ProcessLookupError, PermissionError):
            continue
    return False


def _signal(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
