"""Which process does something, so that whoever comes later can tell whether it still lives.

A `Process` names one for good: numbers of processes are given again, but not with the same start, within one
boot and one namespace. Only on its own machine can anybody tell that it has ended; of a process elsewhere
signs of life must speak.
"""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_NONE = 0
_UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Process:
    """One process. ``started`` is in the kernel's ticks since boot, -1 where that cannot be told."""

    machine: str
    """As `machine` says it."""
    pid: int
    started: int

    @classmethod
    def current(cls) -> Process:
        """This one."""
        return cls(machine(), os.getpid(), _started(os.getpid()))

    @property
    def observable(self) -> bool:
        """Whether this machine can tell whether it lives: it is, or was, one of its own."""
        return self.machine == machine() and self.started != _UNKNOWN

    @property
    def ended_here(self) -> bool:
        """Whether it was a process of this machine that is no more."""
        return self.observable and _started(self.pid) not in (self.started, _UNKNOWN)


@cache
def machine() -> str:
    """Eight digits that are the same for everybody who sees the same processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        processes = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        boot, processes = "", 0
    return hashlib.sha256(f"{socket.gethostname()} {boot} {processes}".encode()).hexdigest()[:8]


def _started(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except FileNotFoundError:
        return _NONE if Path("/proc/self/stat").exists() else _UNKNOWN
    except OSError:
        return _UNKNOWN
    # A zombie does nothing any more.
    return _NONE if fields[0] in "ZX" else int(fields[19])
