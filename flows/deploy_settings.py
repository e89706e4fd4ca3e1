"""The table `[deploy]` of `lifecycle.toml`: who processes the steps, and which workers there are for exports.

Without pools an export runs in the process that validated its step. With pools it runs on the smallest one
that its plan fits, as a run of the deployment ``export-checkpoint/<name of the pool>``.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import ByteSize, Field, field_validator

from flows.sections import Seconds, Section

LOCAL_DASK = "local"

_POOL_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}", re.ASCII)


class PoolSettings(Section):
    """A Prefect work pool, and what one run on it may take."""

    name: str
    memory: ByteSize
    """Bytes of memory that one run may hold, everything included. A local worker kills what exceeds it."""
    disk: ByteSize | None = None
    """Bytes of local disk that one run may fill; not counted for what goes to a bucket."""
    workers: Annotated[int, Field(ge=0, le=64)] = 1
    """Workers that `make deploy-local` starts."""
    runs: Annotated[int, Field(ge=1, le=1000)] = 2
    """Runs at once on each of them."""

    @field_validator("name")
    @classmethod
    def _plain(cls, value: str) -> str:
        if not _POOL_NAME.fullmatch(value):
            raise ValueError("should be lower case letters, digits and '-'")
        return value


class DeploySettings(Section):
    """How the flows are spread over workers, and where the local deployment listens."""

    steps: Literal["here", "runs"] = "here"
    """Who processes due steps: the watcher itself, or runs of the deployment `process-checkpoint`."""
    max_runs: Annotated[int, Field(ge=1, le=10_000)] = 50
    """Runs of `process-checkpoint` that may be unfinished at a time; further steps wait for a later pass."""
    pools: tuple[PoolSettings, ...] = ()
    """Pools for exports; the order does not matter."""
    overhead: ByteSize = ByteSize(384 << 20)
    """Bytes that a run takes beside what its plan says: Python, Prefect and storage clients."""
    pickup_timeout: Seconds = 600.0
    """Seconds after which an export that no worker has begun counts as failed."""
    export_timeout: Seconds = 21_600.0
    """Seconds that a begun export may take before it is cancelled."""
    shards_at_once: Annotated[int, Field(ge=1, le=256)] = 1
    """Shards of one safetensors export that are written at the same time, each within the memory budget."""
    dask: str = ""
    """Where shards are written: the address of a Dask scheduler, or ``local`` for processes of the export's
    own; threads if empty."""
    port: Annotated[int, Field(ge=1, le=65_535)] = 4200
    """Port on loopback of the server that `make deploy-local` starts."""

    @property
    def shards_here(self) -> int:
        """Shards that one machine writes at the same time."""
        return self.shards_at_once if self.dask in ("", LOCAL_DASK) else 1

    @field_validator("dask")
    @classmethod
    def _address(cls, value: str) -> str:
        if value not in ("", LOCAL_DASK) and "://" not in value:
            raise ValueError("should be an address such as tcp://scheduler:8786, or local")
        return value

    @field_validator("pools")
    @classmethod
    def _different(cls, value: tuple[PoolSettings, ...]) -> tuple[PoolSettings, ...]:
        names = [pool.name for pool in value]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name!r} is the name of two pools")
        return value
