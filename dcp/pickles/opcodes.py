"""What each opcode of pickle protocols 0 to 5 does to a `Machine`.

`ACTIONS` is indexed by opcode byte; literals come from `dcp.pickles.literals`. An opcode without an entry
of its own is refused; STOP has none, since it ends the loop in `dcp.pickles.reader`.
"""

from __future__ import annotations

import pickle
import struct
from functools import partial

from dcp.pickles.literals import LITERALS, Action, decimal, entry
from dcp.pickles.machine import Machine
from dcp.pickles.nodes import Build, Call, Global, NewObj, Value
from dcp.pickles.tables import WEIGHTS_ONLY_OPCODES

_HIGHEST_PROTOCOL = 5
_UINT32 = struct.Struct("<I")

_OTHERS: dict[int, Action] = {}
_on = partial(entry, _OTHERS)


# Framing


@_on(pickle.PROTO)
def _proto(m: Machine) -> None:
    version = m.number(1)
    if version > _HIGHEST_PROTOCOL:
        m.fail(f"protocol {version} is not known")


@_on(pickle.FRAME)
def _frame(m: Machine) -> None:
    length = m.number(8)
    if length > len(m.data) - m.position:
        m.fail(f"a frame of {length:,} bytes is announced, {len(m.data) - m.position:,} are left")


# Containers


@_on(pickle.MARK)
def _mark(m: Machine) -> None:
    m.frames.append(m.stack)
    m.stack = []


@_on(pickle.EMPTY_LIST)
def _empty_list(m: Machine) -> None:
    m.stack.append([])


@_on(pickle.EMPTY_DICT)
def _empty_dict(m: Machine) -> None:
    m.stack.append({})


@_on(pickle.EMPTY_SET)
def _empty_set(m: Machine) -> None:
    m.stack.append(set())


@_on(pickle.TUPLE)
def _tuple(m: Machine) -> None:
    items = m.since_mark()
    m.stack.append(tuple(items))


@_on(pickle.TUPLE1)
def _tuple1(m: Machine) -> None:
    m.stack[-1] = (m.stack[-1],)


@_on(pickle.TUPLE2)
def _tuple2(m: Machine) -> None:
    second = m.stack.pop()
    m.stack[-1] = (m.stack[-1], second)


@_on(pickle.TUPLE3)
def _tuple3(m: Machine) -> None:
    third, second = m.stack.pop(), m.stack.pop()
    m.stack[-1] = (m.stack[-1], second, third)


@_on(pickle.LIST)
def _list(m: Machine) -> None:
    items = m.since_mark()
    m.stack.append(items)


@_on(pickle.DICT)
def _dict(m: Machine) -> None:
    flat = m.since_mark()
    made: dict[Value, Value] = {}
    m.update(made, flat)
    m.stack.append(made)


@_on(pickle.FROZENSET)
def _frozenset(m: Machine) -> None:
    items = m.since_mark()
    m.stack.append(frozenset(map(m.key, items)))


@_on(pickle.APPEND)
def _append(m: Machine) -> None:
    item = m.stack.pop()
    m.extend(m.stack[-1], [item])


@_on(pickle.APPENDS)
def _appends(m: Machine) -> None:
    items = m.since_mark()
    m.extend(m.stack[-1], items)


@_on(pickle.SETITEM)
def _setitem(m: Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.update(m.stack[-1], [key, value])


@_on(pickle.SETITEMS)
def _setitems(m: Machine) -> None:
    flat = m.since_mark()
    m.update(m.stack[-1], flat)


@_on(pickle.ADDITEMS)
def _additems(m: Machine) -> None:
    items = m.since_mark()
    target = m.stack[-1]
    if isinstance(target, set):
        target.update(map(m.key, items))
    else:
        m.fail(f"members are added to a {type(target).__name__}")


# Stack and memo


@_on(pickle.POP)
def _pop(m: Machine) -> None:
    if m.stack or not m.frames:
        m.drop([m.stack.pop()])
    else:
        m.since_mark()


@_on(pickle.POP_MARK)
def _pop_mark(m: Machine) -> None:
    m.drop(m.since_mark())


@_on(pickle.DUP)
def _dup(m: Machine) -> None:
    m.stack.append(m.stack[-1])


@_on(pickle.BINPUT)
def _binput(m: Machine) -> None:
    m.memo[m.data[m.position]] = m.stack[-1]
    m.position += 1


@_on(pickle.LONG_BINPUT)
def _long_binput(m: Machine) -> None:
    m.memo[_UINT32.unpack_from(m.data, m.position)[0]] = m.stack[-1]
    m.position += 4


@_on(pickle.PUT)
def _put(m: Machine) -> None:
    m.remember(decimal(m, m.line()))


@_on(pickle.MEMOIZE)
def _memoize(m: Machine) -> None:
    m.remember(len(m.memo))


@_on(pickle.BINGET)
def _binget(m: Machine) -> None:
    index = m.data[m.position]
    m.position += 1
    m.recall(index)


@_on(pickle.LONG_BINGET)
def _long_binget(m: Machine) -> None:
    m.recall(m.number(4))


@_on(pickle.GET)
def _get(m: Machine) -> None:
    m.recall(decimal(m, m.line()))


# What an unpickler would import, call or fetch


@_on(pickle.GLOBAL)
def _global(m: Machine) -> None:
    module, name = m.line().decode(), m.line().decode()
    m.stack.append(m.find(module, name))


@_on(pickle.STACK_GLOBAL)
def _stack_global(m: Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    m.stack.append(m.find(module, name))


@_on(pickle.REDUCE)
def _reduce(m: Machine) -> None:
    args = m.stack.pop()
    m.stack[-1] = m.call(m.stack[-1], args)


@_on(pickle.INST)
def _inst(m: Machine) -> None:
    module, name = m.line().decode(), m.line().decode()
    args = m.since_mark()
    m.stack.append(m.call(m.find(module, name), tuple(args)))


@_on(pickle.OBJ)
def _obj(m: Machine) -> None:
    func, *args = m.since_mark() or m.fail("an object is made without a class")
    m.stack.append(m.call(func, tuple(args)))


def _new_object(m: Machine, kwargs: Value) -> None:
    args = m.stack.pop()
    cls = m.stack[-1]
    if not isinstance(args, tuple) or not isinstance(kwargs, dict | None):
        m.fail("the arguments of a call are not a tuple and a dict")
    if not isinstance(cls, Global | Call):
        m.fail(f"a {type(cls).__name__} is called")
    m.stack[-1] = NewObj(cls, args, kwargs=kwargs)


@_on(pickle.NEWOBJ)
def _newobj(m: Machine) -> None:
    _new_object(m, None)


@_on(pickle.NEWOBJ_EX)
def _newobj_ex(m: Machine) -> None:
    _new_object(m, m.stack.pop())


@_on(pickle.BUILD)
def _build(m: Machine) -> None:
    state = m.stack.pop()
    target = m.stack[-1]
    if not isinstance(target, Call):
        m.fail(f"state is set on a {type(target).__name__}", unsafe=isinstance(target, Global))
    target.then.append(Build(state))


@_on(pickle.BINPERSID)
def _binpersid(m: Machine) -> None:
    m.stack[-1] = m.persistent(m.stack[-1])


@_on(pickle.PERSID)
def _persid(m: Machine) -> None:
    m.stack.append(m.persistent(m.line().decode("ascii")))


@_on(pickle.EXT1)
@_on(pickle.EXT2)
@_on(pickle.EXT4)
def _extension(m: Machine) -> None:
    m.fail("it uses the extension registry", unsafe=True)


@_on(pickle.NEXT_BUFFER)
@_on(pickle.READONLY_BUFFER)
def _out_of_band(m: Machine) -> None:
    m.fail("it refers to buffers kept outside of it")


def _unknown(m: Machine) -> None:
    m.fail(f"0x{m.data[m.offset]:02x} is no opcode")


def _strange(name: str, action: Action) -> Action:
    def noting(m: Machine) -> None:
        m.strange[name] = None
        action(m)

    return noting


_KNOWN = LITERALS | _OTHERS
_NAMES = {code[0]: name for name, code in vars(pickle).items() if isinstance(code, bytes) and len(code) == 1}
ACTIONS: list[Action] = [
    _strange(_NAMES[opcode], _KNOWN[opcode])
    if opcode in _KNOWN and _NAMES[opcode] not in WEIGHTS_ONLY_OPCODES
    else _KNOWN.get(opcode, _unknown)
    for opcode in range(256)
]
