"""A checkpoint that changes while it is exported: nothing of it may come out, and no other fault counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dcp.checkpoint import Checkpoint, changes
from dcp.errors import ChangedError, CheckpointError, NotFoundError


def require_unchanged(checkpoint: Checkpoint) -> None:
    """Refuse what was changed since it was listed.

    Raises:
        ChangedError: it was.
        StorageError: it cannot be listed.
    """
    for found in changes(checkpoint):
        raise ChangedError(
            f"{checkpoint.url}: {found.message}; nothing was written", code=found.code, file=found.file
        )


@contextmanager
def change_told(checkpoint: Checkpoint) -> Iterator[None]:
    """What is missing or damaged in a checkpoint that somebody changes meanwhile is no damage of its own."""
    try:
        yield
    except ChangedError:
        raise
    except (NotFoundError, CheckpointError) as error:
        try:
            require_unchanged(checkpoint)
        except ChangedError as changed:
            raise changed from error
        raise
