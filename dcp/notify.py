"""Tell whoever watches a run that a step was committed, from within the training job.

`notify_committed` posts a few bytes of JSON over HTTP, which `ckpt listen` takes. It is a courtesy: whatever
goes wrong, the job goes on, after a bounded time, and the watcher finds the step by itself at its next pass.
"""

from __future__ import annotations

import json
import logging
import os
import time
import urllib.error
import urllib.request
from threading import Thread

from dcp.errors import UnreachableError, UsageError
from dcp.storage import normalise_url

TO = "CKPT_NOTIFY_URL"
"""Environment variable that says where notices go where the call does not."""
SECRET = "CKPT_NOTIFY_SECRET"
"""Environment variable with the secret that the listener expects, if it expects one."""

_PAUSE = 0.5
_SHOWN = 200
"""Characters of a URL that a message shows."""

_log = logging.getLogger(__name__)


def notify_committed(
    url: str,
    to: str | None = None,
    *,
    secret: str | None = None,
    timeout: float = 5.0,
    raise_errors: bool = False,
) -> bool:
    """Say that the step at ``url`` is committed. Call it on one rank, once the save has returned.

    Args:
        url: the step's directory, as it was saved to.
        to: where `ckpt listen` listens, such as ``http://watcher:8377/``; ``CKPT_NOTIFY_URL`` in the
            environment if None.
        secret: what the listener expects; ``CKPT_NOTIFY_SECRET`` in the environment if None.
        timeout: seconds that the call may take, everything included.
        raise_errors: raise instead of returning False.

    Returns:
        Whether the listener took the notice.

    Raises:
        UsageError: only with ``raise_errors``: it is not said where to, or that is no HTTP URL.
        UnreachableError: only with ``raise_errors``: the notice did not arrive in time, or was refused.
    """
    failure: list[UsageError | UnreachableError] = []

    def attempt() -> None:
        try:
            _send(url, to or os.environ.get(TO, ""), secret or os.environ.get(SECRET, ""), timeout)
        except (UsageError, UnreachableError) as error:
            failure.append(error)
        # A training job must not die of a courtesy.
        except Exception as error:
            failure.append(
                UnreachableError(f"no notice of {_shown(url)} ({type(error).__name__}: {error})", url)
            )

    # No timeout of a socket bounds the look-up of a name, so a thread of its own does.
    sender = Thread(target=attempt, daemon=True, name="notify-committed")
    sender.start()
    sender.join(timeout)
    if sender.is_alive():
        failure.append(UnreachableError(f"no notice of {_shown(url)} within {timeout:g} s", url))
    if not failure:
        return True
    if raise_errors:
        raise failure[0]
    _log.warning("%s; the watcher will find the step at its next pass", failure[0])
    return False


def _send(url: str, to: str, secret: str, timeout: float) -> None:
    """Post the notice, again after a short pause while time is left and the listener may yet take it."""
    if not to.startswith(("http://", "https://")):
        raise UsageError(
            f"{_shown(to)!r} is no HTTP URL to send notices to; set {TO}, e.g. http://watcher:8377/"
        )
    headers = {"Content-Type": "application/json", "User-Agent": "ckpt-lifecycle"}
    if secret:
        headers["Authorization"] = f"Bearer {secret}"
    body = json.dumps({"event": "committed", "url": normalise_url(url), "at": time.time()}).encode()
    deadline = time.monotonic() + timeout
    while True:
        request = urllib.request.Request(to, body, headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=max(0.1, deadline - time.monotonic())):
                return
        except urllib.error.HTTPError as error:
            reason, passing = f"HTTP {error.code}", error.code >= 500 or error.code == 429
            error.close()
        except OSError as error:
            reason, passing = str(getattr(error, "reason", error)) or type(error).__name__, True
        if not passing or time.monotonic() + _PAUSE >= deadline:
            raise UnreachableError(f"{_shown(to)} did not take the notice of {_shown(url)} ({reason})", to)
        time.sleep(_PAUSE)


def _shown(url: str) -> str:
    """As much of a URL as belongs into a line of a log."""
    return url if len(url) <= _SHOWN else f"{url[: _SHOWN - 1]}…"
