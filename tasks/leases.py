"""Leases: who is working on a step now, so that nobody else starts it, and how a dead worker's is taken over.

Below ``.ledger/.leases/`` stands ``<step>.<NNNNNN>.claim`` for every step that is being worked on. A claim is
created only if absent and never written again; the highest number holds the step. Its holder writes
``<step>.<NNNNNN>.beat`` anew from time to time (`Lease`), and removes both when it is done, so finished steps
leave nothing behind. Taking over is creating the next number: of several that try, one succeeds.

Whether a holder is alive is never decided by comparing two machines' clocks. The store says when claim and
beat were written and when a probe was that the observer writes now: all by the store's own clock. A holder
on this very machine whose process has ended is dead at once. Only where a store tells no times is the
holder's clock read, with `SKEW` to spare.

A lease spares work; it is not what keeps a step from being published twice. A holder that was stopped for
longer than the expiry may not know yet that it was replaced, and publication is idempotent for that reason.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Thread
from types import TracebackType

from pydantic import BaseModel, ConfigDict, ValidationError

from dcp.errors import CkptError, EnvironmentFault, NotFoundError, StorageError
from dcp.processes import Process
from dcp.storage import ObjectInfo, Store
from tasks.ledger import create_once, timestamp

PREFIX = ".leases/"
EXPIRY = 300.0
"""Seconds without a sign of life after which a holder is taken for dead."""
BEATS = 5
"""Signs of life within the expiry."""
SKEW = 600.0
"""Seconds by which clocks of two machines may differ, where nothing but them tells."""

_NAME = re.compile(r"\.leases/(?P<step>[^/]+)\.(?P<number>\d{6})\.(?P<kind>claim|beat)", re.ASCII)
_PROBE = f"{PREFIX}probe"
_LIMIT = 1 << 16
_LEAST_PAUSE = 1.0

_log = logging.getLogger(__name__)


class LeaseLostError(EnvironmentFault):
    """Another worker has taken the step over; whatever is left to do is its work now."""


class Holder(BaseModel):
    """Content of a claim. ``since`` is UTC in ISO 8601, ``at`` the same in seconds, by the holder's clock."""

    model_config = ConfigDict(frozen=True)

    who: str
    since: str
    at: float
    machine: str
    pid: int
    started: int
    """With ``machine`` and ``pid`` what `Process` has."""
    token: str

    @property
    def ended_here(self) -> bool:
        """Whether it was a process of this machine that is no more."""
        return Process(self.machine, self.pid, self.started).ended_here


@dataclass(frozen=True, slots=True)
class Standing:
    """A lease as a listing shows it."""

    step: str
    number: int
    claim: ObjectInfo
    beat: ObjectInfo | None
    objects: tuple[ObjectInfo, ...]
    """Every object of the step's leases, older ones too."""

    @property
    def alive_at(self) -> float | None:
        """Last sign of life by the store's clock; None where it tells no times."""
        times = [info.modified for info in (self.claim, self.beat) if info and info.modified is not None]
        return max(times, default=None)


def standings(objects: Iterable[ObjectInfo]) -> dict[str, Standing]:
    """The leases among the objects of a ledger, by step."""
    found: dict[str, list[tuple[int, str, ObjectInfo]]] = {}
    for info in objects:
        match = _NAME.fullmatch(info.name)
        if match:
            found.setdefault(match["step"], []).append((int(match["number"]), match["kind"], info))
    leases = {}
    for step, parts in found.items():
        number = max((n for n, kind, _ in parts if kind == "claim"), default=None)
        if number is None:
            continue
        of = {kind: info for n, kind, info in parts if n == number}
        leases[step] = Standing(
            step, number, of["claim"], of.get("beat"), tuple(info for _, _, info in sorted(parts, key=_order))
        )
    return leases


def _order(part: tuple[int, str, ObjectInfo]) -> tuple[int, str]:
    """Beats before their claim, so that removal in this order never leaves a beat alone."""
    return part[0], part[1]


def touch(store: Store) -> None:
    """Write to a ledger's store what means nothing. Raises `StorageError` where it cannot be written."""
    store.replace(_PROBE, uuid.uuid4().hex.encode())


class Leases:
    """The leases of one run."""

    def __init__(self, store: Store, expiry: float = EXPIRY) -> None:
        """``store`` is the ledger's; ``expiry`` in seconds, the same for every worker of a run."""
        self.store = store
        self.expiry = expiry

    def acquire(self, step: str) -> Lease | None:
        """Take the lease of a step; None if somebody alive holds it.

        Raises:
            StorageError: the store failed.
        """
        current = self.standing(step)
        if current is not None and not self.dead(current):
            return None
        number = current.number + 1 if current else 1
        process = Process.current()
        holder = Holder(
            who=f"{socket.gethostname()}:{process.pid}",
            since=timestamp(time.time()),
            at=time.time(),
            machine=process.machine,
            pid=process.pid,
            started=process.started,
            token=uuid.uuid4().hex,
        )
        name = f"{PREFIX}{step}.{number:06d}.claim"
        if not create_once(self.store, name, holder.model_dump_json().encode()):
            return None
        mine = self.standing(step)
        if mine is None or mine.number != number:
            return None
        if current is not None:
            _log.warning("%s was left by a worker that died; taken over", step)
        return Lease(self, step, number, mine.claim.identity)

    def standing(self, step: str) -> Standing | None:
        """The step's lease, from one listing."""
        return self.all().get(step)

    def all(self) -> dict[str, Standing]:
        """Every lease, from one listing of those there are now."""
        try:
            found = self.store.child(PREFIX.rstrip("/")).objects()
        except NotFoundError:
            return {}
        return standings(
            ObjectInfo(f"{PREFIX}{info.name}", info.size, info.modified, info.identity) for info in found
        )

    def holder(self, standing: Standing) -> Holder | None:
        """Who holds it; None if it was given back meanwhile, or says nothing that can be understood."""
        try:
            return Holder.model_validate_json(self.store.read(standing.claim.name, _LIMIT))
        except (NotFoundError, ValidationError):
            return None

    def dead(self, standing: Standing) -> bool:
        """Whether a lease's holder is taken for dead."""
        holder = self.holder(standing)
        if holder is not None and holder.ended_here:
            return True
        alive_at = standing.alive_at
        if alive_at is None:
            return self._dead_by_its_own_clock(standing, holder)
        # The store's clock, twice: no other clock is asked.
        touch(self.store)
        now = self.store.info(_PROBE).modified
        return now is not None and now - alive_at >= self.expiry

    def _dead_by_its_own_clock(self, standing: Standing, holder: Holder | None) -> bool:
        at = holder.at if holder else 0.0
        if standing.beat is not None:
            # If it is given back meanwhile, or unreadable, the claim's own time stands.
            with suppress(NotFoundError, ValueError, KeyError, TypeError):
                at = max(at, float(json.loads(self.store.read(standing.beat.name, _LIMIT))["at"]))
        return time.time() - at >= self.expiry + SKEW

    def sweep(self, standing: Standing) -> bool:
        """Remove what a dead worker left; False if it is alive."""
        if not self.dead(standing):
            return False
        self.remove(standing, standing.number)
        return True

    def remove(self, standing: Standing, number: int) -> None:
        """Remove the objects of a step's leases up to ``number``."""
        for info in standing.objects:
            match = _NAME.fullmatch(info.name)
            if match and int(match["number"]) <= number:
                self.store.remove(info.name)


class Lease:
    """A step's lease while it is held: as a context it gives signs of life, and is given back at the end."""

    def __init__(self, leases: Leases, step: str, number: int, identity: str) -> None:
        self.leases = leases
        self.step = step
        self.number = number
        self._identity = identity
        self._count = 0
        self._done = Event()
        self._heart = Thread(target=self._beat, daemon=True, name=f"lease-{step}")

    def __enter__(self) -> Lease:
        self._heart.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        try:
            self.release()
        except CkptError as failed:
            # It expires by itself. What happened inside matters more.
            _log.warning("the lease of %s could not be given back: %s", self.step, failed)

    def stop(self) -> None:
        """End the signs of life."""
        self._done.set()
        self._heart.join()

    def renew(self) -> bool:
        """Give a sign of life; False if the lease was lost.

        Raises:
            StorageError: the store failed, so nothing is known.
        """
        if self._standing() is None:
            return False
        self._count += 1
        beat = json.dumps({"count": self._count, "at": time.time()}).encode()
        self.leases.store.replace(f"{PREFIX}{self.step}.{self.number:06d}.beat", beat)
        return True

    def require(self) -> None:
        """Make sure, now, that nobody has taken the step over.

        Raises:
            LeaseLostError: somebody has.
            StorageError: the store failed, so nothing is known.
        """
        if not self.renew():
            raise LeaseLostError(f"another worker has taken {self.step} over; it goes on from here")

    def release(self) -> None:
        """Give the lease back, unless it was lost."""
        standing = self._standing()
        if standing is not None:
            self.leases.remove(standing, self.number)

    def _standing(self) -> Standing | None:
        """This lease in the store, if it still stands."""
        standing = self.leases.standing(self.step)
        if standing is None or (standing.number, standing.claim.identity) != (self.number, self._identity):
            return None
        return standing

    def _beat(self) -> None:
        while not self._done.wait(max(_LEAST_PAUSE, self.leases.expiry / BEATS)):
            try:
                if not self.renew():
                    return
            except StorageError as error:
                # The next beat may get through; before anything is published `require` asks again.
                _log.debug("no sign of life for %s: %s", self.step, error)
