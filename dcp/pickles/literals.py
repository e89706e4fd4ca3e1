"""Opcodes that push a literal: constants, numbers, strings and bytes.

`LITERALS` maps opcode bytes to what they do to a `Machine`; `dcp.pickles.opcodes` has the rest.
"""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Callable
from functools import partial

from dcp.pickles.machine import Machine
from dcp.pickles.nodes import Value

MAX_INT_BYTES = 1700
"""Longest int taken, in bytes: Python refuses to print longer ones."""

Action = Callable[[Machine], None]

_INT32 = struct.Struct("<i")
_FLOAT = struct.Struct(">d")
_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|([0-7]{1,3})|(.))", re.DOTALL)
_ESCAPED = {
    b"\n": b"", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v",
    b"\\": b"\\", b"'": b"'", b'"': b'"',
}  # fmt: skip


LITERALS: dict[int, Action] = {}


def entry(table: dict[int, Action], opcode: bytes) -> Callable[[Action], Action]:
    """Decorator: enter a function into ``table`` as what ``opcode`` does."""

    def enter(action: Action) -> Action:
        table[opcode[0]] = action
        return action

    return enter


_on = partial(entry, LITERALS)


# Constants and numbers


def _push(opcode: bytes, value: Value) -> None:
    LITERALS[opcode[0]] = lambda m: m.stack.append(value)


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


def decimal(m: Machine, text: bytes) -> int:
    """A number in digits, as protocol 0 writes it."""
    if not re.fullmatch(rb"\s*[+-]?[0-9]{1,4000}\s*", text):
        m.fail("an int is not a decimal number of at most 4000 digits")
    return int(text)


@_on(pickle.INT)
def _int(m: Machine) -> None:
    text = m.line()
    m.stack.append(text == b"01" if text in {b"00", b"01"} else decimal(m, text))


@_on(pickle.LONG)
def _long(m: Machine) -> None:
    m.stack.append(decimal(m, m.line().removesuffix(b"L")))


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

    LITERALS[opcode[0]] = action


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
