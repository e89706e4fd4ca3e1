"""Which work pool an export runs on: the smallest one that its plan fits. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dcp.errors import ResourceError
from flows.deploy_settings import PoolSettings
from tasks.export_plan import StepNeed


def smallest_pool(
    pools: Sequence[PoolSettings], need: StepNeed, *, overhead: int
) -> tuple[PoolSettings, int]:
    """The pool to run on, and the bytes of memory to ask for there.

    Args:
        pools: at least one.
        need: what the export takes by itself.
        overhead: bytes that any run takes beside it.

    Raises:
        ResourceError: no pool has enough; says what is needed and what there is.
    """
    memory = need.memory + overhead
    for pool in sorted(pools, key=lambda pool: (pool.memory, pool.disk is None, pool.disk or 0, pool.name)):
        if memory <= pool.memory and (pool.disk is None or need.disk <= pool.disk):
            return pool, memory
    limits = ", ".join(
        f"{pool.name} {int(pool.memory)}" + (f" and disk {int(pool.disk)}" if pool.disk is not None else "")
        for pool in pools
    )
    raise ResourceError(
        f"the export needs {memory} bytes of memory and {need.disk} of local disk, more than any pool allows "
        f"({limits}); lower its memory_budget, or add a larger pool to [deploy]"
    )
