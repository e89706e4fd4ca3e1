"""What the machine has left, by the kernel's files of either cgroup version, and what is refused for it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dcp.errors import ResourceError
from dcp.exporting import export, machine, plan_export
from dcp.sizes import human_bytes


def write(root: Path, **files: str) -> None:
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@pytest.fixture
def kernel(tmp_path: Path) -> tuple[Path, Path]:
    """The files of a system with 1000 KiB available and no cgroup limit."""
    write(tmp_path / "proc", meminfo="MemTotal: 4000 kB\nMemAvailable:  1000 kB\n", self__cgroup="0::/a/b\n")
    (tmp_path / "cgroups").mkdir()
    return tmp_path / "proc", tmp_path / "cgroups"


def test_of_the_system(kernel: tuple[Path, Path]) -> None:
    assert machine.memory_left(*kernel) == 1000 << 10
    (kernel[0] / "meminfo").unlink()
    assert machine.memory_left(*kernel) is None


def test_of_the_tightest_group_around(kernel: tuple[Path, Path]) -> None:
    _, cgroups = kernel
    write(cgroups, a__b__memory_DOT_max="max\n", a__b__memory_DOT_current="500\n")
    assert machine.memory_left(*kernel) == 1000 << 10
    write(cgroups, a__memory_DOT_max="9000", a__memory_DOT_current="5000")
    assert machine.memory_left(*kernel) == 4000
    write(cgroups, a__memory_DOT_stat="anon 1\ninactive_file 1500\nactive_file 500\n")
    assert machine.memory_left(*kernel) == 6000, "the page cache gives way"
    write(cgroups, a__memory_DOT_current="99999")
    assert machine.memory_left(*kernel) == 0


def test_of_groups_of_the_first_version(kernel: tuple[Path, Path]) -> None:
    proc, cgroups = kernel
    write(proc, self__cgroup="4:cpu,memory:/docker/1234\n1:pids:/x\n0::/\n")
    write(
        cgroups,
        memory__memory_DOT_limit_in_bytes="8000",
        memory__memory_DOT_usage_in_bytes="3000",
        memory__memory_DOT_stat="total_inactive_file 1000\ninactive_file 7\n",
    )
    assert machine.memory_left(*kernel) == 6000


def test_of_this_machine(tmp_path: Path) -> None:
    left = machine.memory_left()
    assert left is not None
    assert 0 < left <= psutil.virtual_memory().total
    assert 0 < machine.memory_used() <= machine.peak_memory()
    free = machine.disk_left(str(tmp_path / "not" / "there"))
    assert free is not None
    assert abs(free - shutil.disk_usage(tmp_path).free) < 1 << 30
    assert machine.disk_left("gs://bucket/x") is None


@pytest.mark.parametrize("format", ["torch", "safetensors"])
def test_what_cannot_be_done_is_refused_with_both_numbers(
    format: str, golden: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, out = str(golden("torch_fsdp_tp_2x2")), str(tmp_path / "out")
    plan = plan_export(step, out, format=format)  # type: ignore[arg-type]
    assert plan.memory_available
    assert plan.disk_free
    monkeypatch.setattr(machine, "disk_left", lambda _: plan.disk - 1)
    with pytest.raises(ResourceError, match=r"needs .* \(1 bytes more\) of disk and .* are free"):
        export(step, out, format=format)  # type: ignore[arg-type]
    monkeypatch.undo()
    monkeypatch.setattr(machine, "memory_used", lambda: 0)
    monkeypatch.setattr(machine, "memory_left", lambda: 12345)
    needed = re.escape(human_bytes(plan.memory))
    with pytest.raises(ResourceError, match=rf"{needed} of memory are needed and 12\.1 KiB can be had"):
        export(step, out, format=format)  # type: ignore[arg-type]
    assert plan_export(step, out, format=format).memory_available == 12345  # type: ignore[arg-type]
    # What is to be had is held against the whole of what is needed, in the plan as in the refusal.
    for used, refused in ((0, True), (plan.memory - 12345, False)):
        monkeypatch.setattr(machine, "memory_used", lambda used=used: used)
        again = plan_export(step, out, format=format)  # type: ignore[arg-type]
        assert bool(again.refusals) == refused
        assert again.memory_available == 12345 + used
    assert not list(tmp_path.iterdir())
