"""The process of one gloo rank: ``python -m dcp.load.gloo_start JOB``.

It ends when its standard input does, so that it cannot outlive whoever started it, however that ended; and
takes away the directory that they shared. The watch begins before torch is imported, which takes seconds.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path

from dcp.collector import gc_paused


def main() -> None:
    """Run the job that the file named on the command line describes."""
    threading.Thread(target=_end_with_starter, daemon=True).start()
    # The collector would look through torch's modules while they come, for a fifth of the time they take.
    with gc_paused():
        from dcp.load.gloo_rank import main as load

    load()


def _end_with_starter() -> None:
    # Not sys.stdin, whose lock would be waited for by whatever looks at it.
    while os.read(0, 1 << 10):
        pass
    shutil.rmtree(Path(sys.argv[1]).parent, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main()
