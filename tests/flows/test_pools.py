"""Which pool an export runs on."""

import pytest
from pydantic import ByteSize

from dcp.errors import ResourceError
from flows.deploy_settings import PoolSettings
from flows.pools import smallest_pool
from tasks.export_plan import StepNeed

GB = 1 << 30


def _pool(name: str, memory: int, disk: int | None = None) -> PoolSettings:
    return PoolSettings(name=name, memory=ByteSize(memory), disk=None if disk is None else ByteSize(disk))


def _need(memory: int, disk: int = 0) -> StepNeed:
    return StepNeed(memory=memory, disk=disk, bytes=0, seconds=0.0)


POOLS = [_pool("large", 64 * GB), _pool("small", 2 * GB, disk=10 * GB), _pool("middle", 8 * GB, disk=99 * GB)]


@pytest.mark.parametrize(
    ("memory", "disk", "expected"),
    [
        (GB, 0, "small"),
        (2 * GB - 7, 10 * GB, "small"),
        (2 * GB - 6, 0, "middle"),
        (GB, 10 * GB + 1, "middle"),
        (GB, 100 * GB, "large"),
        (8 * GB, 0, "large"),
    ],
)
def test_the_smallest_that_fits(memory: int, disk: int, expected: str) -> None:
    pool, asked = smallest_pool(POOLS, _need(memory, disk), overhead=7)
    assert pool.name == expected
    assert asked == memory + 7


def test_none_fits() -> None:
    with pytest.raises(ResourceError) as caught:
        smallest_pool(POOLS[1:], _need(8 * GB, 5), overhead=3)
    text = str(caught.value)
    assert f"needs {8 * GB + 3} bytes of memory and 5 of local disk" in text
    assert f"small {2 * GB} and disk {10 * GB}, middle {8 * GB} and disk {99 * GB}" in text
