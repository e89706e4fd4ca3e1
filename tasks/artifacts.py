"""Artifacts of a Prefect run, for people who look at its UI, sent from a thread: nothing waits for them.

`Artifacts` is a ``with`` block inside a run; ``markdown``, ``table`` and ``link`` return at once. An API that
is slow or away delays and fails nothing: it is missed once in the log. Keys are made by `artifact_key`: one
for each kind of page of a run, not one a step, since Prefect shows artifacts of the same key as a history
and slows with the number of keys.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any

logger = logging.getLogger(__name__)

LAST_SECONDS = 5.0
"""How long artifacts that are not sent yet may hold up the end of a run."""
_LONGEST = 60

_Send = Callable[[], object]


def artifact_key(*words: str) -> str:
    """A key that Prefect takes: lower-case letters, digits and dashes.

    Words that lose anything but case on the way get a digest, so that ``a_b`` and ``a.b`` stay apart.
    """
    text = "-".join(words)
    key = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")
    if key and key == text.lower() and len(key) <= _LONGEST:
        return key
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:6]
    return f"{key[:_LONGEST].rstrip('-')}-{digest}".lstrip("-")


class Artifacts:
    """What one run shows."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Send | None] = SimpleQueue()
        self._missed = False
        # The run to which artifacts belong is found through the context.
        self._thread = Thread(target=copy_context().run, args=(self._work,), name="artifacts", daemon=True)

    def __enter__(self) -> Artifacts:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.put(None)
        self._thread.join(LAST_SECONDS)

    def markdown(self, key: str, text: str, description: str) -> None:
        """Show a page."""

        def send() -> object:
            from prefect.artifacts import create_markdown_artifact

            return create_markdown_artifact(text, key=key, description=description)

        self._queue.put(send)

    def table(self, key: str, rows: Sequence[Mapping[str, Any]], description: str) -> None:
        """Show a table; its columns are the names in each row."""

        def send() -> object:
            from prefect.artifacts import create_table_artifact

            return create_table_artifact([dict(row) for row in rows], key=key, description=description)

        self._queue.put(send)

    def link(self, key: str, address: str, text: str, description: str) -> None:
        """Show a link."""

        def send() -> object:
            from prefect.artifacts import create_link_artifact

            return create_link_artifact(address, text, key=key, description=description)

        self._queue.put(send)

    def _work(self) -> None:
        while (send := self._queue.get()) is not None:
            try:
                send()
            # Whatever is wrong with the API, the run is not to fail for it.
            except Exception as error:
                if not self._missed:
                    logger.warning("artifacts cannot be shown: %s", " ".join(str(error).split())[:300])
                self._missed = True
