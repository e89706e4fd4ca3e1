"""Values and nodes to the bytes that CPython's own pickler writes at protocol 2, as `torch.save` uses it.

The same opcodes in the same order: what is memoised and when, batches of 1000, ints by size, bytes,
bytearrays, sets and complex numbers spelled as calls, Python 2 names for globals. As there, whether
something is written again or referred to depends on object identity, strings included; a `Global` is
referred to by name. The work is done on an explicit stack, so depth costs no recursion. A value that
contains itself is refused, as `dcp.pickles.reader` refuses it.

Two things have no spelling at protocol 2: NEWOBJ_EX is written as it is, and a nested name becomes the
walk by `getattr` that CPython writes.
"""

from __future__ import annotations

import pickle
import struct
from _compat_pickle import REVERSE_IMPORT_MAPPING, REVERSE_NAME_MAPPING
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from dcp.collector import gc_paused
from dcp.errors import UsageError
from dcp.pickles.nodes import (
    Build,
    Call,
    Extend,
    Global,
    Key,
    NewObj,
    PersistentRef,
    Reduce,
    Step,
    Update,
    Value,
)

Expand = Callable[[object], Value]

_BATCH = 1000
_ENCODE = Global("_codecs", "encode")
_GETATTR = Global("builtins", "getattr")
_ORDERED_DICT = Global("collections", "OrderedDict")
_TUPLES = {1: pickle.TUPLE1, 2: pickle.TUPLE2, 3: pickle.TUPLE3}
_BINPUTS = [pickle.BINPUT + bytes((index,)) for index in range(256)]
_BINGETS = [pickle.BINGET + bytes((index,)) for index in range(256)]
_BININT1S = [pickle.BININT1 + bytes((value,)) for value in range(256)]
_INTS = {int}
_UINT32 = struct.Struct("<I")
_INT32 = struct.Struct("<i")
_FLOAT = struct.Struct(">d")


def write(value: Value, *, expand: Expand | None = None) -> bytes:
    """Pickle ``value``.

    Args:
        value: plain values (`OrderedDict` too) and nodes.
        expand: turns an object of any other type into a value, once for each object; for the types it
            does not know it should raise.

    Raises:
        UsageError: a type that has no spelling, a value that contains itself, or a name that does not
            fit into a protocol 2 pickle.
    """
    with gc_paused():
        return _Writer(expand).run(value)


class _Then:
    """Work for after a value's parts: bytes to emit, and what becomes of the value."""

    __slots__ = ("close", "code", "memoize", "value")

    def __init__(
        self, code: bytes, value: Value = None, *, memoize: bool = False, close: bool = False
    ) -> None:
        self.code = code
        self.value = value
        self.memoize = memoize
        self.close = close


_MARK = _Then(pickle.MARK)
_APPEND, _APPENDS = _Then(pickle.APPEND), _Then(pickle.APPENDS)
_SETITEM, _SETITEMS = _Then(pickle.SETITEM), _Then(pickle.SETITEMS)
_BUILD, _PERSISTENT = _Then(pickle.BUILD), _Then(pickle.BINPERSID)


class _Writer:
    def __init__(self, expand: Expand | None) -> None:
        self._expand = expand
        self._out = bytearray(pickle.PROTO + b"\x02")
        self._todo: list[Value | _Then] = []
        self._memo: dict[int, int] = {}  # id -> memo index
        self._names: dict[Global, int] = {}  # -> memo index
        self._count = 0
        self._open: set[int] = set()  # ids of the containers and nodes being written
        self._kept: list[Value] = []  # made on the way; an id must not come back while it is in the memo
        self._expanded: dict[int, Value] = {}  # id of an object of another type -> what stands for it
        self._actions: dict[type, Callable[[Any], None]] = {
            type(None): lambda _: self._emit(pickle.NONE),
            bool: lambda value: self._emit(pickle.NEWTRUE if value else pickle.NEWFALSE),
            int: self._int,
            float: lambda value: self._emit(pickle.BINFLOAT + _FLOAT.pack(value)),
            str: self._str,
            bytes: self._bytes,
            bytearray: self._bytearray,
            complex: self._complex,
            tuple: self._tuple,
            list: self._list,
            dict: self._dict,
            OrderedDict: self._ordered_dict,
            set: self._set,
            frozenset: self._set,
            Global: self._global,
            Reduce: self._call,
            NewObj: self._call,
            PersistentRef: self._persistent,
            Key: self._key,
        }

    def run(self, value: Value) -> bytes:
        todo, actions, out = self._todo, self._actions, self._out
        todo.append(value)
        while todo:
            value = todo.pop()
            if type(value) is _Then:
                out += value.code
                if value.memoize:
                    self._memoize(value.value)
                if value.close:
                    self._open.discard(id(value.value))
            else:
                actions.get(type(value), self._other)(value)
        self._emit(pickle.STOP)
        return bytes(self._out)

    # Emitting and the memo

    def _emit(self, code: bytes) -> None:
        self._out += code

    def _memoize(self, value: Value) -> None:
        index = self._count
        self._count = index + 1
        if type(value) is Global:
            self._names[value] = index
        else:
            self._memo[id(value)] = index
        self._out += _BINPUTS[index] if index < 256 else pickle.LONG_BINPUT + _UINT32.pack(index)

    def _refer(self, index: int) -> None:
        self._out += _BINGETS[index] if index < 256 else pickle.LONG_BINGET + _UINT32.pack(index)

    def _known(self, value: Value) -> bool:
        """Refer to ``value`` if it was written before."""
        if id(value) in self._open:
            raise UsageError("a value contains itself; it cannot be written")
        index = self._memo.get(id(value))
        if index is None:
            return False
        self._refer(index)
        return True

    def _push(self, *work: Value | _Then) -> None:
        self._todo.extend(reversed(work))

    # Atoms

    def _int(self, value: int) -> None:
        if 0 <= value < 256:
            self._out += _BININT1S[value]
        elif 0 <= value < 65536:
            self._out += pickle.BININT2 + value.to_bytes(2, "little")
        elif -(1 << 31) <= value < 1 << 31:
            self._out += pickle.BININT + _INT32.pack(value)
        else:
            raw = pickle.encode_long(value)
            if len(raw) < 256:
                self._out += pickle.LONG1 + bytes((len(raw),)) + raw
            else:
                self._out += pickle.LONG4 + _INT32.pack(len(raw)) + raw

    def _str(self, value: str) -> None:
        index = self._memo.get(id(value))
        if index is not None:
            self._refer(index)
            return
        raw = value.encode("utf-8", "surrogatepass")
        if len(raw) > 0xFFFFFFFF:
            raise UsageError("a string of 4 GiB or more cannot be written at protocol 2")
        self._out += pickle.BINUNICODE + _UINT32.pack(len(raw)) + raw
        self._memoize(value)

    def _global(self, value: Global) -> None:
        index = self._names.get(value)
        if index is not None:
            self._refer(index)
            return
        outer, dot, last = value.name.rpartition(".")
        if dot:
            self._spell(value, _GETATTR, (Global(value.module, outer), last))
            return
        module, name = value.module, value.name
        if (module, name) in REVERSE_NAME_MAPPING:
            module, name = REVERSE_NAME_MAPPING[module, name]
        else:
            module = REVERSE_IMPORT_MAPPING.get(module, module)
        spelled = f"{module}\n{name}\n"
        if spelled.count("\n") != 2 or not spelled.isascii():
            raise UsageError(f"the name {str(value)!r} has no spelling at protocol 2")
        self._out += pickle.GLOBAL + spelled.encode()
        self._memoize(value)

    # Values that pickle spells as calls

    def _spell(self, value: Value, func: Global, args: tuple[Value, ...]) -> None:
        self._kept.append(args)
        self._push(func, args, _Then(pickle.REDUCE, value, memoize=True))

    def _bytes(self, value: bytes) -> None:
        if not self._known(value):
            if value:
                self._spell(value, _ENCODE, (value.decode("latin1"), "latin1"))
            else:
                self._spell(value, Global("builtins", "bytes"), ())

    def _bytearray(self, value: bytearray) -> None:
        if not self._known(value):
            self._spell(value, Global("builtins", "bytearray"), (bytes(value),) if value else ())

    def _complex(self, value: complex) -> None:
        if not self._known(value):
            self._spell(value, Global("builtins", "complex"), (value.real, value.imag))

    def _set(self, value: set[Value] | frozenset[Value]) -> None:
        if not self._known(value):
            self._spell(value, Global("builtins", type(value).__name__), (list(value),))

    # Containers

    def _tuple(self, value: tuple[Value, ...]) -> None:
        if not value:
            self._out += pickle.EMPTY_TUPLE
        elif not self._known(value):
            code = _TUPLES.get(len(value))
            if code is None:
                self._out += pickle.MARK
                code = pickle.TUPLE
            if set(map(type, value)) == _INTS:  # shapes and strides: nothing in them to come back for
                for item in value:
                    self._int(item)  # type: ignore[arg-type]
                self._out += code
                self._memoize(value)
                return
            self._open.add(id(value))
            self._todo.append(_Then(code, value, memoize=True, close=True))
            self._todo.extend(reversed(value))

    def _list(self, value: list[Value]) -> None:
        if self._known(value):
            return
        self._out += pickle.EMPTY_LIST
        self._memoize(value)
        if len(value) == 1:
            self._within(value, (*value, _APPEND))
        elif value:
            self._within(value, _marked(_batches(value), _APPENDS))

    def _dict(self, value: dict[Value, Value]) -> None:
        if self._known(value):
            return
        self._out += pickle.EMPTY_DICT
        self._memoize(value)
        pairs = list(value.items())
        if len(pairs) == 1:
            self._within(value, (*pairs[0], _SETITEM))
        elif pairs:
            # CPython looks for more after each full batch, and writes an empty one if there is none.
            batches = _batches(pairs) + ([()] if len(pairs) % _BATCH == 0 else [])
            self._within(value, _marked(map(_flat, batches), _SETITEMS))

    def _within(self, value: Value, work: Iterable[Value | _Then]) -> None:
        self._open.add(id(value))
        self._push(*work, _Then(b"", value, close=True))

    # Nodes

    def _ordered_dict(self, value: OrderedDict[Value, Value]) -> None:
        steps: list[Step] = [Update(list(value.items()))]
        if value.__dict__:
            steps.append(Build(value.__dict__))
        self._object(value, (_ORDERED_DICT, ()), pickle.REDUCE, steps)

    def _call(self, value: Call) -> None:
        if not isinstance(value, NewObj):
            self._object(value, (value.func, value.args), pickle.REDUCE, value.then)
        elif value.kwargs is None:
            self._object(value, (value.func, value.args), pickle.NEWOBJ, value.then)
        else:
            self._object(value, (value.func, value.args, value.kwargs), pickle.NEWOBJ_EX, value.then)

    def _object(self, value: Value, parts: Sequence[Value], code: bytes, steps: Sequence[Step]) -> None:
        if not self._known(value):
            made = _Then(code, value, memoize=True)
            self._within(value, (*parts, made, *chain.from_iterable(map(_step, steps))))

    def _persistent(self, value: PersistentRef) -> None:
        self._push(value.pid, _PERSISTENT)

    def _key(self, value: Key) -> None:
        self._push(value.value)

    def _other(self, value: object) -> None:
        if id(value) not in self._expanded:
            if self._expand is None:
                raise UsageError(f"a {type(value).__name__} has no spelling in a pickle of plain values")
            self._expanded[id(value)] = self._expand(value)
        self._push(self._expanded[id(value)])


def _step(step: Step) -> Iterable[Value | _Then]:
    """The work of one step, batched as CPython batches the items of an object it reduces."""
    if isinstance(step, Build):
        return (step.state, _BUILD)
    if isinstance(step, Extend):
        return _loose(_batches(step.items), _APPEND, _APPENDS)
    return _loose(map(_flat, _batches(step.pairs)), _SETITEM, _SETITEMS)


def _batches(items: Sequence[Any]) -> list[Sequence[Any]]:
    return [items[start : start + _BATCH] for start in range(0, len(items), _BATCH)]


def _flat(pairs: Sequence[tuple[Value, Value]]) -> list[Value]:
    return list(chain.from_iterable(pairs))


def _marked(batches: Iterable[Sequence[Value]], end: _Then) -> Iterable[Value | _Then]:
    return chain.from_iterable((_MARK, *batch, end) for batch in batches)


def _loose(batches: Iterable[Sequence[Value]], single: _Then, many: _Then) -> Iterable[Value | _Then]:
    """As `_marked`, but a batch of one item (or one pair) goes without a MARK."""
    one = 1 if single is _APPEND else 2
    return chain.from_iterable(
        (*batch, single) if len(batch) == one else (_MARK, *batch, many) for batch in batches
    )
