"""Wait for what must become true, however busy the machine is."""

import time
from collections.abc import Callable
from pathlib import Path


def until(done: Callable[[], object], *, seconds: float = 60, every: float = 0.05) -> None:
    """Return once `done()` is true; fail where that takes `seconds`, far more than it ever does."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"it did not happen within {seconds:g} s"
        time.sleep(every)


def runs(pid: int) -> bool:
    """Whether the process is there and no zombie, which nobody may be there to reap. Looks into /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
