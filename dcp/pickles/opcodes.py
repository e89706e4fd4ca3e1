"""What each opcode of pickle protocols 0 to 5 does to a `Machine`.

`ACTIONS` is indexed by opcode byte. An opcode without an entry of its own is refused; STOP has none,
since it ends the loop in `dcp.pickles.reader`.
"""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Callable

from dcp.pickles.machine import Machine
from dcp.pickles.nodes import Build, Call, Global, NewObj, Value

MAX_INT_BYTES = 1700
"""Longest int taken, in bytes: Python refuses to print longer ones."""

Action = Callable[[Machine], None]

_HIGHEST_PROTOCOL = 5
_INT32 = struct.Struct("<i")
_UINT32 = struct.Struct("<I")
_FLOAT = struct.Struct(">d")
_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|([0-7]{1,3})|(.))", re.DOTALL)
_ESCAPED = {
    b"\n": b"", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v",
    b"\\": b"\\", b"'": b"'", b'"': b'"',
}  # fmt: skip


def _unknown(m: Machine) -> None:
    m.fail(f"0x{m.data[m.offset]:02x} is no opcode")


ACTIONS: list[Action] = [_unknown] * 256


def _on(opcode: bytes) -> Callable[[Action], Action]:
    def enter(action: Action) -> Action:
        ACTIONS[opcode[0]] = action
        return action

    return enter


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


# Constants and numbers


def _push(opcode: bytes, value: Value) -> None:
    ACTIONS[opcode[0]] = lambda m: m.stack.append(value)


_push(pickle.NONE, None)
_push(pickle.NEWTRUE, True)
_push(pickle.NEWFALSE, False)
_push(pickle.EMPTY_TUPLE, ())


@_on(pickle.BININT)
def _binint(m: Machine) -> None:
    m.stack.append(_INT32.unpack(m.take(4))[0])


@_on(pickle.BININT1)
def _binint1(m: Machine) -> None:
    m.stack.append(m.data[m.position])
    m.position += 1


@_on(pickle.BININT2)
def _binint2(m: Machine) -> None:
    m.stack.append(m.number(2))


def _integer(m: Machine, length: int) -> None:
    if not 0 <= length <= MAX_INT_BYTES:
        m.fail(f"an int of {length:,} bytes is announced; the most taken is {MAX_INT_BYTES:,}")
    m.stack.append(int.from_bytes(m.take(length), "little", signed=True))


@_on(pickle.LONG1)
def _long1(m: Machine) -> None:
    _integer(m, m.number(1))


@_on(pickle.LONG4)
def _long4(m: Machine) -> None:
    _integer(m, _INT32.unpack(m.take(4))[0])


def _decimal(m: Machine, text: bytes) -> int:
    if not re.fullmatch(rb"\s*[+-]?[0-9]{1,4000}\s*", text):
        m.fail("an int is not a decimal number of at most 4000 digits")
    return int(text)


@_on(pickle.INT)
def _int(m: Machine) -> None:
    text = m.line()
    m.stack.append(text == b"01" if text in {b"00", b"01"} else _decimal(m, text))


@_on(pickle.LONG)
def _long(m: Machine) -> None:
    m.stack.append(_decimal(m, m.line().removesuffix(b"L")))


@_on(pickle.FLOAT)
def _float(m: Machine) -> None:
    text = m.line()
    if len(text) > 4000:
        m.fail("a float is written with over 4000 characters")
    m.stack.append(float(text))


@_on(pickle.BINFLOAT)
def _binfloat(m: Machine) -> None:
    m.stack.append(_FLOAT.unpack(m.take(8))[0])


# Strings and bytes


def _counted(opcode: bytes, width: int, decode: Callable[[bytes], Value]) -> None:
    def action(m: Machine) -> None:
        m.stack.append(decode(m.take(int.from_bytes(m.take(width), "little"))))

    ACTIONS[opcode[0]] = action


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _old_text(raw: bytes) -> str | bytes:
    """A Python 2 string: text if it can be read as such, otherwise the bytes it was."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


_counted(pickle.SHORT_BINUNICODE, 1, _text)
_counted(pickle.BINUNICODE, 4, _text)
_counted(pickle.BINUNICODE8, 8, _text)
_counted(pickle.SHORT_BINSTRING, 1, _old_text)
_counted(pickle.BINSTRING, 4, _old_text)
_counted(pickle.SHORT_BINBYTES, 1, bytes)
_counted(pickle.BINBYTES, 4, bytes)
_counted(pickle.BINBYTES8, 8, bytes)
_counted(pickle.BYTEARRAY8, 8, bytearray)


def _unescape(found: re.Match[bytes]) -> bytes:
    hexadecimal, octal, single = found.groups()
    if hexadecimal:
        return bytes.fromhex(hexadecimal.decode())
    if octal:
        return bytes((int(octal, 8) & 255,))
    return _ESCAPED.get(single, found[0])


@_on(pickle.STRING)
def _string(m: Machine) -> None:
    quoted = m.line().strip()
    if len(quoted) < 2 or quoted[:1] != quoted[-1:] or quoted[:1] not in {b"'", b'"'}:
        m.fail("a string is not quoted")
    m.stack.append(_old_text(_ESCAPE.sub(_unescape, quoted[1:-1])))


@_on(pickle.UNICODE)
def _unicode(m: Machine) -> None:
    m.stack.append(m.line().decode("raw-unicode-escape"))


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
    m.remember(_decimal(m, m.line()))


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
    m.recall(_decimal(m, m.line()))


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


def _extension(m: Machine) -> None:
    m.fail("it uses the extension registry", unsafe=True)


def _out_of_band(m: Machine) -> None:
    m.fail("it refers to buffers kept outside of it")


ACTIONS[pickle.EXT1[0]] = ACTIONS[pickle.EXT2[0]] = ACTIONS[pickle.EXT4[0]] = _extension
ACTIONS[pickle.NEXT_BUFFER[0]] = ACTIONS[pickle.READONLY_BUFFER[0]] = _out_of_band
