"""Bytes of a pickle to inert values: protocols 0 to 5, nothing imported, called or built but nodes.

`read` gives the value, proven finite and shallow enough to recurse over; `run` drives a
`dcp.pickles.machine.Machine` over its pickle and is what `dcp.pickles.scan` uses too. Every failure is a
`PickleError` with the offset of the opcode concerned, where there is one.
"""

from __future__ import annotations

import pickle
import struct

from dcp.collector import gc_paused
from dcp.errors import PickleError
from dcp.pickles.graph import check
from dcp.pickles.machine import Machine, PersistentLoad
from dcp.pickles.nodes import Value
from dcp.pickles.opcodes import ACTIONS

MAX_DEPTH = 500
"""Deepest nesting that `read` accepts: Python's own pickler gives up at about twice that."""

_STOP = pickle.STOP[0]
_MIN_UNFOLDED = 10_000_000


def read(data: bytes, *, persistent: PersistentLoad | None = None, max_depth: int = MAX_DEPTH) -> Value:
    """The value that ``data`` holds, up to its STOP opcode.

    Args:
        data: a whole pickle; what follows its end is not looked at.
        persistent: called with each persistent id; what it returns stands in the value instead of a
            `PersistentRef`. It must return something inert.
        max_depth: deepest nesting accepted, in containers and nodes.

    Raises:
        PickleError: malformed; outside the language (``code`` is ``records.unsafe`` where that could only
            be meant to reach code); holding itself; too deep, or too large once sharing is undone.
    """
    machine = Machine(data, persistent)
    with gc_paused():
        value = run(machine)
        if machine.dropped is not None:
            machine.offset = machine.dropped
            machine.fail("an object is made and thrown away, so what making it does would be lost")
        check(value, max_depth=max_depth, max_size=max(_MIN_UNFOLDED, 64 * len(data)))
    return value


def run(machine: Machine) -> Value:
    """Run to STOP; the value on top of the stack.

    Raises:
        PickleError: malformed or refused; ``machine.globals`` then holds what was asked for before.
    """
    data = machine.data
    actions = ACTIONS
    try:
        while True:
            machine.offset = at = machine.position
            machine.position = at + 1
            opcode = data[at]
            if opcode == _STOP:
                value = machine.stack.pop()
                for left in (*machine.frames, machine.stack):
                    machine.drop(left)
                return value
            actions[opcode](machine)
    except IndexError:
        if machine.position >= len(data):
            machine.fail("it ends in the middle")
        machine.fail("it takes more from the stack than is there")
    except (ValueError, OverflowError, struct.error) as error:
        if isinstance(error, PickleError):
            raise
        machine.fail(f"it is malformed ({error})")
