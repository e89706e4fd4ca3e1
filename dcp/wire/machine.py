"""`IndexMachine`: runs the pickle of `.metadata` to the values of `dcp.wire.values`, nothing executed.

A `dcp.pickles.machine.Machine` with a closed set of globals instead of nodes for all of them. What it adds
to the bounds of its base: the memo is only ever as large as what was put in, a state of a shared object is
not copied over and over, and sizes have at most 64 dimensions, as torch's have.

`ACTIONS` differs from `dcp.pickles.opcodes` where an object is made or given its state, and in the memo,
which may hold runs (`dcp.wire.runs`).
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import Any, NoReturn, cast

from dcp.errors import MetadataError
from dcp.pickles import opcodes
from dcp.pickles.machine import Machine
from dcp.pickles.nodes import Value
from dcp.wire.runs import MISSING, Restart, Run, Runs, follows_key
from dcp.wire.values import TABLE, Instance, Known, UnsafeCallError, WireChunk, WireIndex, WireRecord

MAX_DIMS = 64
"""Most dimensions of a tensor, as in torch."""
INTEGERS = frozenset({int})
"""For ``INTEGERS.issuperset(map(type, values))``: all are exact ints, no bools among them."""
NAMES = frozenset({str})
"""The same for texts."""

_STOP = pickle.STOP[0]
_BY_IDENTITY = frozenset({WireIndex, Run})


class IndexMachine(Machine):
    """One run over one `.metadata`.

    Attributes:
        file: its name, for messages.
        size: number of entries of the memo.
        runs: what was skipped, None if nothing may be.
    """

    __slots__ = ("file", "runs", "size")

    def __init__(self, data: bytes, file: str, runs: Runs | None = None) -> None:
        super().__init__(data)
        self.file = file
        self.size = 0
        self.runs = runs

    def fail(self, why: str, *, unsafe: bool = False) -> NoReturn:
        raise MetadataError(
            f"{self.file} cannot be read at byte {self.offset}: {why}",
            code="metadata.unreadable",
            file=self.file,
            offset=self.offset,
        )

    def spend(self, size: int) -> None:
        """Bound what using shared values over and over adds up to, by the bytes there are."""
        self._spend(size)

    def remember(self, index: int) -> None:
        value = self.stack[-1]
        if index == self.size:
            self.size = index + 1
        else:
            if self.runs:
                raise Restart
            self.runs = None
            self.size += index not in self.memo
        if type(value) is Run:
            raise Restart
        self.memo[index] = value

    def recall(self, index: int) -> None:
        value = self.memo.get(index, MISSING)
        if value is MISSING and self.runs:
            value = self.runs.recall(self, index)
        if value is MISSING:
            self.fail(f"it refers to memo entry {index}, which does not exist")
        self.stack.append(value)

    def replay(self, start: int, stop: int, first_entry: int) -> None:
        """Run an item that was skipped, so that the memo holds what it makes from ``first_entry`` on."""
        state = self.position, self.offset, self.stack, self.frames, self.size, self._spare
        runs = self.runs
        assert runs is not None
        self.position, self.stack, self.frames, self.size = start, [], [], first_entry
        runs.paused = True
        try:
            while self.position < stop:
                self.offset = self.position
                self.position += 1
                ACTIONS[self.data[self.offset]](self)
        finally:
            runs.paused = False
            self.position, self.offset, self.stack, self.frames, self.size, self._spare = state

    def find(self, module: Value, name: Value) -> Any:
        if type(module) is not str or type(name) is not str:
            self.fail("the name of a global is not a string")
        found = TABLE.get((module, name))
        if found is None:
            self._refuse(f"{module}.{name}", f"{module}.{name}")
        return found

    def _refuse(self, what: str, name: str) -> NoReturn:
        raise MetadataError(
            f"{self.file} asks for {what}, which is not part of the checkpoint format; "
            "nothing was executed. Do not load this checkpoint with torch until its origin is clear",
            code="metadata.unsafe",
            file=self.file,
            **{"global": name},
        )

    def persistent(self, pid: Value) -> NoReturn:
        raise MetadataError(
            f"{self.file} holds a persistent id, which is not part of the checkpoint format",
            code="metadata.unsafe",
            file=self.file,
        )

    def key(self, value: Value) -> Value:
        return value if type(value) in _BY_IDENTITY else super().key(value)

    def extend(self, target: Value, items: list[Value]) -> None:
        if type(target) is Run:
            raise Restart
        super().extend(target, items)

    def update(self, target: Value, flat: list[Value]) -> None:
        if type(target) is Run:
            raise Restart
        super().update(target, flat)

    def call(self, func: Value, args: Value) -> Value:
        if type(func) is Run:
            raise Restart
        if type(func) is not Known:
            self.fail(f"a {type(func).__name__} is called")
        if type(args) is not tuple:
            self.fail("the arguments of a call are not a tuple")
        try:
            made = func.make(args)
        except UnsafeCallError as error:
            self._refuse(str(error), func.name)
        if isinstance(made, str | tuple) and not (args and made is args[0]):
            self.spend(len(made))
        return made

    def build(self, target: Value, state: Value) -> None:
        """Give an object its state."""
        match target:
            case WireChunk():
                self._build_chunk(target, state)
                if self.runs is not None and not self.runs.paused and self._inside(list):
                    self.runs.item_done(self, "chunk")
            case WireRecord():
                self._build_record(target, state)
                runs = self.runs
                if runs is not None and not runs.paused and follows_key(self.stack) and self._inside(dict):
                    runs.item_done(self, "entry")
            case WireIndex():
                self._build_index(target, state)
            case Instance():
                self._build_instance(target, state)
            case Run():
                raise Restart
            case _:
                self.fail(f"state is set on a {type(target).__name__}")

    def _inside(self, container: type) -> bool:
        """Whether what is pushed now will go to a container of this type."""
        frames = self.frames
        return bool(frames) and bool(frames[-1]) and type(frames[-1][-1]) is container

    def _fields(self, state: Value) -> dict[str, Value]:
        if type(state) is not dict:
            self.fail("the state of an object is not a dict")
        if not NAMES.issuperset(map(type, state)):
            self.fail("an attribute of an object has no name")
        return cast("dict[str, Value]", state)

    def _shape(self, value: Value) -> tuple[int, ...] | None:
        if type(value) is tuple and len(value) <= MAX_DIMS and INTEGERS.issuperset(map(type, value)):
            return value
        return None

    def _build_chunk(self, chunk: WireChunk, state: Value) -> None:
        if chunk.offsets is not None:
            self.fail("a chunk is given its state twice")
        fields = self._fields(state)
        offsets, sizes = self._shape(fields.get("offsets")), self._shape(fields.get("sizes"))
        if offsets is None or sizes is None:
            self.fail(f"a chunk's offsets or sizes are not tuples of at most {MAX_DIMS} integers")
        chunk.offsets, chunk.sizes = offsets, sizes

    def _build_record(self, record: WireRecord, state: Value) -> None:
        if record.path is not None:
            self.fail("a storage entry is given its state twice")
        fields = self._fields(state)
        path, offset, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
        if type(path) is not str or type(offset) is not int or type(length) is not int:
            self.fail("a storage entry has no file or no byte range")
        transforms = fields.get("transform_descriptors") or ()
        if type(transforms) is not list and type(transforms) is not tuple:
            self.fail("transform descriptors are not names")
        self.spend(len(transforms))
        if not NAMES.issuperset(map(type, transforms)):
            self.fail("transform descriptors are not names")
        record.path, record.offset, record.length = path, offset, length
        record.transforms = tuple(transforms)

    def _build_index(self, index: WireIndex, state: Value) -> None:
        if index.fqn is not None:
            self.fail("a storage key is given its state twice")
        fields = self._fields(state)
        fqn, offset = fields.get("fqn"), fields.get("offset")
        if type(fqn) is not str:
            self.fail("a storage entry has no key")
        if offset is not None and self._shape(offset) is None:
            self.fail(f"the offset of a storage entry is not a tuple of at most {MAX_DIMS} integers")
        index.fqn, index.offset = fqn, self._shape(offset)

    def _build_instance(self, target: Instance, state: Value) -> None:
        if type(state) is tuple and len(state) == 2 and isinstance(state[0], dict | type(None)):
            parts: tuple[Value, ...] = state
        elif type(state) is dict:
            parts = (state,)
        else:
            target.fields["state"] = state
            return
        for part in parts:
            if part is None:
                continue
            fields = self._fields(part)
            self.spend(len(fields))
            target.fields.update(fields)

    def run(self) -> Value:
        """Run to STOP; the value on top of the stack.

        Raises:
            MetadataError: malformed or refused.
            Restart: it has to be run without skipping anything.
        """
        data = self.data
        actions = ACTIONS
        try:
            while True:
                self.offset = at = self.position
                self.position = at + 1
                opcode = data[at]
                if opcode == _STOP:
                    if self.runs is not None and self.runs.undelivered:
                        raise Restart
                    return self.stack.pop()
                actions[opcode](self)
        except (IndexError, ValueError, OverflowError, struct.error, MetadataError) as error:
            if self.runs is not None and self.runs.lost(self):
                raise Restart from None
            self._explain(error)

    def _explain(self, error: Exception) -> NoReturn:
        if isinstance(error, MetadataError):
            raise error
        if isinstance(error, IndexError):
            if self.position >= len(self.data):
                self.fail("it ends in the middle")
            self.fail("it takes more from the stack than is there")
        self.fail(f"it is malformed ({error})")


# Where opcodes differ from `dcp.pickles.opcodes`


def _new_object(m: IndexMachine) -> None:
    args = m.stack.pop()
    m.stack[-1] = m.call(m.stack[-1], args)


def _new_object_with_names(m: IndexMachine) -> None:
    if m.stack.pop():
        m.fail("an object is made with named arguments")
    _new_object(m)


def _build(m: IndexMachine) -> None:
    state = m.stack.pop()
    m.build(m.stack[-1], state)


def _appends(m: IndexMachine) -> None:
    items = m.since_mark()
    m.extend(m.stack[-1], items)
    if m.runs is not None and m.runs.undelivered:
        m.runs.deliver(items, "chunk")


def _setitems(m: IndexMachine) -> None:
    flat = m.since_mark()
    if m.runs is not None and m.runs.undelivered:
        # A run stands for keys and values at once; it is its own key.
        doubled: list[Value] = []
        for value in flat:
            doubled += (value, value) if type(value) is Run else (value,)
        m.runs.deliver(doubled[::2], "entry")
        flat = doubled
    m.update(m.stack[-1], flat)


def _dup(m: IndexMachine) -> None:
    if type(m.stack[-1]) is Run:
        raise Restart
    m.stack.append(m.stack[-1])


def _binput(m: IndexMachine) -> None:
    m.remember(m.number(1))


def _long_binput(m: IndexMachine) -> None:
    m.remember(m.number(4))


def _memoize(m: IndexMachine) -> None:
    m.remember(m.size)


_OWN: dict[bytes, Callable[[IndexMachine], None]] = {
    pickle.NEWOBJ: _new_object,
    pickle.NEWOBJ_EX: _new_object_with_names,
    pickle.BUILD: _build,
    pickle.APPENDS: _appends,
    pickle.SETITEMS: _setitems,
    pickle.DUP: _dup,
    pickle.BINPUT: _binput,
    pickle.LONG_BINPUT: _long_binput,
    pickle.MEMOIZE: _memoize,
}

ACTIONS: list[Callable[[IndexMachine], None]] = list(opcodes.ACTIONS)
"""What each opcode does, by opcode byte."""
for _opcode, _action in _OWN.items():
    ACTIONS[_opcode[0]] = _action
