"""Claims on a prefix of a bucket, where there are no locks: hidden objects that name their writers.

Whoever wants a prefix puts a claim into it and then looks whether another stands. Of two writers the one that
looks later sees the other's claim, so that never both go on. A claim is renewed while its process lives.
One of a process of this machine that has died, or of another machine that has not been renewed for
`EXPIRY`, counts for nothing and is removed. Ages are told by the store's clock alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

from dcp.errors import BusyError, ForbiddenError, NotFoundError, StorageError
from dcp.storage.store import Held, Store
from dcp.storage.uploads import is_abandoned, is_bare, living_mark

EXPIRY = 180.0
"""Seconds without a sign of life after which another machine's writer is taken for dead.

Fewer than of whatever starts another one in its place, such as a lease that is taken over.
"""
BEAT = EXPIRY / 10
"""Seconds between two signs of life."""
_PATIENCE = 2.0
"""Seconds that one of several newcomers waits for the others to step back."""
_PAUSE = 0.1


@contextmanager
def claim(inside: Store) -> Iterator[Held]:
    """Keep a prefix as `Store.claimed` says, by objects that `Store.unfinished` lists.

    Where nothing may be listed, nobody is kept out. It takes one object written, one listing, and one object
    removed, and three requests every `BEAT`.
    """
    with living_mark() as mark:
        own = _Claim(inside, mark)
        done = Event()
        beating = Thread(target=own.renew, args=(done,), name="claim", daemon=True)
        try:
            own.take()
            beating.start()
            yield own.require
        finally:
            done.set()
            if beating.ident is not None:
                beating.join()
            # One that stays counts for nothing as soon as this process has ended.
            with suppress(StorageError):
                inside.remove(own.name)


class _Claim:
    def __init__(self, inside: Store, name: str) -> None:
        self.name = name
        self._inside = inside
        self._lost = False

    def take(self) -> None:
        self._put()
        patience = time.monotonic() + _PATIENCE
        # Who may write need not be allowed to list.
        with suppress(ForbiddenError):
            while rivals := self._living_rivals():
                # Of several that come at once the first by name waits until the others have stepped back.
                if self.name > min(rivals) or time.monotonic() > patience:
                    raise BusyError(f"somebody else is writing to {self._inside.url}", self._inside.url)
                time.sleep(_PAUSE)

    def _put(self) -> None:
        self._inside.replace(self.name, b"claimed\n")

    def _living_rivals(self) -> list[str]:
        """Claims that stand in the way of this one; those of dead writers are removed."""
        listed = dict(self._inside.unfinished())
        now = listed.get(self.name)
        living = []
        for name, modified in listed.items():
            if name == self.name or not is_bare(name):
                continue
            if is_abandoned(name, modified, now=now, seconds=EXPIRY):
                # It counts for nothing all the same.
                with suppress(ForbiddenError):
                    self._inside.remove(name)
            else:
                living.append(name)
        return living

    def renew(self, done: Event) -> None:
        while not done.wait(BEAT) and not self._lost:
            # The next beat may get through.
            with suppress(StorageError):
                self._beat()

    def _beat(self) -> None:
        """Show that this writer lives, or learn that it was silent for so long that it counted for dead."""
        try:
            before = self._inside.info(self.name).modified
        except NotFoundError:
            self._lost = True
            return
        self._put()
        after = self._inside.info(self.name).modified
        if before is not None and after is not None and after - before > EXPIRY:
            self._lost = True

    def require(self) -> None:
        # Where a claim cannot be looked at or renewed, nobody is kept out.
        with suppress(ForbiddenError):
            self._beat()
        if self._lost:
            raise BusyError(
                f"somebody else may have taken over {self._inside.url}: this process gave no sign of life "
                f"for {EXPIRY / 60:.0f} minutes",
                self._inside.url,
            )
