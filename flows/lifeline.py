"""A program that ends another one when whoever started it has died, in whatever way.

``python lifeline.py PID`` waits until its standard input closes, which it does at the latest when the kernel
clears away a starter that was killed, and then ends the process PID unless it has ended by itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time

_PATIENCE = 5.0
"""Seconds that the process has to end itself."""


def main(pid: int) -> None:
    """Wait for the end of input, then end ``pid``."""
    sys.stdin.buffer.read()
    for number, patience in ((signal.SIGTERM, _PATIENCE), (signal.SIGKILL, 0.0)):
        deadline = time.monotonic() + patience
        try:
            os.kill(pid, number)
            while time.monotonic() < deadline:
                time.sleep(0.05)
                os.kill(pid, 0)
        except ProcessLookupError:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]))
