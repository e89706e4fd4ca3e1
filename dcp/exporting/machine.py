"""What the machine has left: memory that this process may still take, and disk where the output goes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from dcp.errors import ResourceError
from dcp.sizes import human_bytes

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def memory_left(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Bytes of memory to be had: of the system, and of every cgroup around this process that has a limit.

    What files take in the page cache can be had too. None where the system does not tell.

    Args:
        proc, cgroups: where the kernel's files are mounted.
    """
    system = _fields(proc / "meminfo", ":").get("MemAvailable")
    left = [] if system is None else [system << 10]
    left += _left_in_cgroups(proc, cgroups)
    return max(0, min(left)) if left else None


def memory_to_be_had() -> int | None:
    """Bytes of memory that this process may take in all, what it takes now included; as `memory_left`."""
    left = memory_left()
    return None if left is None else left + memory_used()


def peak_memory() -> int:
    """Largest resident size of this process in bytes; 0 where the system does not tell."""
    # Not getrusage: its figure is inherited from the parent across fork and exec.
    return _fields(_PROC / "self/status", ":").get("VmHWM", 0) << 10


def memory_used() -> int:
    """Resident size of this process in bytes; 0 where the system does not tell."""
    return _fields(_PROC / "self/status", ":").get("VmRSS", 0) << 10


def disk_left(url: str) -> int | None:
    """Bytes free on the disk of a local path, which need not exist; None for anything remote."""
    if "://" in url:
        return None
    place = Path(url)
    while not place.exists():
        place = place.parent
    usage = shutil.disk_usage(place)
    # Some filesystems over a network say nothing of their size.
    return usage.free if usage.total else None


def require_room(memory: int, disk: int, dest: str) -> None:
    """Refuse what the machine cannot do.

    Args:
        memory: bytes that the process will take at its peak, all it takes now included.
        disk: bytes of output.
        dest: where it goes.

    Raises:
        ResourceError: with what is needed and what there is.
    """
    for refusal in shortfalls(memory, disk, dest):
        raise ResourceError(refusal)


def shortfalls(memory: int, disk: int, dest: str) -> list[str]:
    """What the machine lacks for an export, with both numbers; arguments as for `require_room`."""
    found = []
    available = memory_to_be_had()
    if available is not None and memory > available:
        found.append(
            f"{_both(memory, available)} of memory are needed and {human_bytes(available)} can be had; "
            f"lower --memory-budget, or take a larger machine"
        )
    free = disk_left(dest)
    if free is not None and disk > free:
        found.append(
            f"{dest} needs {_both(disk, free)} of disk and {human_bytes(free)} are free; "
            f"free some, or write elsewhere"
        )
    return found


def _both(needed: int, there: int) -> str:
    """What is needed, and by how much that is more, where both would read alike."""
    text = human_bytes(needed)
    return text if text != human_bytes(there) else f"{text} ({needed - there:,} bytes more)"


def _left_in_cgroups(proc: Path, cgroups: Path) -> Iterator[int]:
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        limit, usage = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
        place = root / path.strip("/")
        # In a container the path may be the host's, while only the container's own group is mounted.
        for group in {root, place, *(p for p in place.parents if p.is_relative_to(root))}:
            most, used = (_number(group / f"memory.{name}") for name in (limit, usage))
            if most is not None and used is not None:
                stat = _fields(group / "memory.stat", " ")
                whole = "total_" if controllers else ""
                cached = stat.get(f"{whole}inactive_file", 0) + stat.get(f"{whole}active_file", 0)
                yield most - max(0, used - cached)


def _number(file: Path) -> int | None:
    """A file's number; None if it has none, as where there is no limit."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _fields(file: Path, separator: str) -> dict[str, int]:
    """Names and numbers of a file of lines; lines without a number are left out."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(separator, 1) for line in lines if separator in line)
    return {name: int(rest.split()[0]) for name, rest in pairs if rest.split() and rest.split()[0].isdigit()}
