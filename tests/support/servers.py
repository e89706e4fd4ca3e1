"""Start a real HTTP server on loopback for the tests, wait until it answers, and end it."""

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.web import free_port

_LIFELINE = Path(__file__).with_name("lifeline.py")


@contextmanager
def serve(
    name: str,
    command: Callable[[int], list[str]],
    *,
    health: str,
    directory: Path,
    timeout: float = 60,
) -> Iterator[str]:
    """Run `command(port)` and yield its endpoint `http://127.0.0.1:<port>`.

    It is ready once the path `health` answers with success; its output goes to a file in `directory`, whose
    end is shown if it does not start within `timeout` seconds. A port lost to another program between choice
    and use is tried again.
    """
    for _ in range(5):
        port = free_port()
        endpoint = f"http://127.0.0.1:{port}"
        log = directory / f"{name}-{port}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(_LIFELINE), *command(port)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            if _wait_until_ready(process, endpoint + health, timeout):
                yield endpoint
                return
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=15)
    raise RuntimeError(f"{name} did not start within {timeout} s:\n{log.read_text(errors='replace')[-2000:]}")


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return process.poll() is None
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    return False
