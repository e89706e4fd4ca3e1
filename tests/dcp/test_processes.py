"""Whether the process that did something still lives, as far as this machine can tell."""

import subprocess
import sys
from dataclasses import replace

import pytest

from dcp.processes import Process
from tests.support.waiting import runs, until


def test_a_process_lives_until_it_ends() -> None:
    code = "from dcp.processes import Process; p = Process.current(); "
    code += "print(p.machine, p.pid, p.started, flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    machine, pid, started = child.stdout.readline().split()
    process = Process(machine, int(pid), int(started))
    try:
        assert process.pid == child.pid
        assert process.observable
        assert not process.ended_here
    finally:
        child.kill()
        # What nobody has waited for yet is no process any more either.
        until(lambda: not runs(child.pid))
        assert process.ended_here
        child.communicate()
    assert process.ended_here


def test_a_number_that_was_given_again_is_another_process() -> None:
    me = Process.current()
    assert not me.ended_here
    assert replace(me, started=me.started - 1).ended_here


@pytest.mark.parametrize("there", [{"machine": "00000000"}, {"started": -1}])
def test_of_what_cannot_be_seen_nothing_is_said(there: dict[str, str | int]) -> None:
    gone = replace(Process.current(), pid=1 << 22 | 1, **{"started": 5, **there})  # type: ignore[arg-type]
    assert not gone.observable
    assert not gone.ended_here
    assert replace(Process.current(), pid=1 << 22 | 1).ended_here
