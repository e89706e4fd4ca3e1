"""Outages that cannot be noted where everything else is, because it is the ledger that is out of reach.

They are noted on this machine, in the user's state directory: since when, and whether people were told. So
all passes of a machine tell of an outage once, be they of one process or of many. Where not even that can
be noted, as in a container of one pass, nothing is told here: `ckpt-watch-silent` tells.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from flows.settings import RunSettings

_FORGOTTEN = 3600.0
"""Seconds without a failed pass after which the next one begins an outage of its own."""


class Unnoted:
    """What this machine knows of an outage of a run's ledger."""

    def __init__(self, run: RunSettings, clock: Callable[[], float] = time.time) -> None:
        identity = hashlib.sha256(f"{run.publish}\0{run.name}".encode()).hexdigest()[:32]
        self._seen = _state_home() / "ckpt-lifecycle" / f"unreachable-{identity}"
        self._told = self._seen.with_suffix(".told")
        self._clock = clock

    def now(self) -> float:
        """Seconds since the epoch."""
        return self._clock()

    def since(self) -> float | None:
        """Note that the ledger failed just now; since when it has, in seconds since the epoch."""
        now = self._clock()
        try:
            self._seen.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            since = self._known(now)
            if since is None:
                since = now
                self._told.unlink(missing_ok=True)
                self._seen.write_text(json.dumps(since))
            os.utime(self._seen, (now, now))
        except OSError:
            return None
        return since

    def _known(self, now: float) -> float | None:
        try:
            if now - self._seen.stat().st_mtime > _FORGOTTEN:
                return None
            return float(self._seen.read_text())
        # A file that was cut off says nothing.
        except (FileNotFoundError, ValueError):
            return None

    @property
    def told(self) -> bool:
        """Whether somebody on this machine has told people, or is about to."""
        return self._told.exists()

    def claim(self) -> bool:
        """Whether it is for the caller to tell people."""
        try:
            self._told.touch(exist_ok=False)
        except OSError:
            return False
        return True

    def withdraw(self) -> None:
        """Nobody was reached: the next pass is to tell."""
        with suppress(OSError):
            self._told.unlink()

    def over(self) -> bool:
        """Forget the outage, since the ledger answers; whether people had been told of it."""
        told = False
        with suppress(OSError):
            self._seen.unlink()
            # Of several passes the one that removes it tells.
            self._told.unlink()
            told = True
        return told


def _state_home() -> Path:
    given = os.environ.get("XDG_STATE_HOME")
    if given:
        return Path(given)
    try:
        return Path.home() / ".local/state"
    except RuntimeError:
        # A user without a home, as containers have them: nothing can be made below it, nothing is remembered.
        return Path(os.devnull)
