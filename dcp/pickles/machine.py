"""The state of one run over a pickle, and the few things that opcodes do to it.

`dcp.pickles.opcodes` says what each opcode does in these terms, `dcp.pickles.reader` runs it. Where an
unpickler would call something, a node is made; only the handful of calls by which pickle itself spells
plain values (`bytes`, `bytearray`, `set`, `frozenset`, `complex`) are undone to those values.

The input is taken to be hostile. No length in it is believed before it is held against the bytes that are
left, nothing is sized by a number in it, and a value's hash is only taken where that is cheap and cannot
be made to collide at will.
"""

from __future__ import annotations

from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable
from typing import NoReturn

from dcp.errors import PickleError
from dcp.pickles.nodes import Call, Extend, Global, Key, NewObj, PersistentRef, Reduce, Update, Value

PersistentLoad = Callable[[Value], Value]

_MAX_KEY_ITEMS = 16
_MAX_EQUAL_HASHES = 64
_PLAIN_KEYS = frozenset({str, bytes, bool, type(None), float, Global, Reduce, NewObj, PersistentRef})
_FLAT = frozenset({str, bytes, bool, type(None), float, int})


class Machine:
    """One run over one pickle.

    Attributes:
        globals: every global asked for so far, with the offset in bytes where it was first.
        offset: where the opcode being run starts, in bytes.
        position: the next byte to read; after the run, the end of the pickle.
        dropped: offset at which a call's result was thrown away, which a value cannot show.
        strange: what ``torch.load(weights_only=True)`` cannot read, whatever it asks for: opcodes by name.
        stack: what was pushed since the innermost MARK; ``frames`` holds what is below each MARK.
    """

    __slots__ = (
        "_by_hash",
        "_persistent",
        "_spare",
        "data",
        "dropped",
        "frames",
        "globals",
        "memo",
        "offset",
        "position",
        "stack",
        "strange",
    )

    def __init__(self, data: bytes, persistent: PersistentLoad | None = None) -> None:
        self.data = bytes(data)
        self.position = 0
        self.offset = 0
        self.stack: list[Value] = []
        self.frames: list[list[Value]] = []
        self.memo: dict[int, Value] = {}
        self.globals: dict[Global, int] = {}
        self.dropped: int | None = None
        self.strange: dict[str, None] = {}
        self._by_hash: dict[int, list[Value]] = {}
        self._persistent = persistent
        self._spare = 4 * len(self.data) + 1024

    def fail(self, why: str, *, unsafe: bool = False) -> NoReturn:
        """Raise a `PickleError` that says where; ``unsafe`` if only an attack would do this."""
        raise PickleError(
            f"the pickle cannot be read at byte {self.offset}: {why}",
            code="records.unsafe" if unsafe else "records.undecodable",
            offset=self.offset,
        )

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        start = self.position
        end = start + count
        if end > len(self.data):
            self.fail(f"{count:,} bytes are announced, {len(self.data) - start:,} are left")
        self.position = end
        return self.data[start:end]

    def number(self, width: int) -> int:
        """An unsigned little-endian number of ``width`` bytes."""
        return int.from_bytes(self.take(width), "little")

    def line(self) -> bytes:
        """Up to the next newline, without it."""
        end = self.data.find(b"\n", self.position)
        if end < 0:
            self.fail("a line has no end")
        text = self.data[self.position : end]
        self.position = end + 1
        return text

    def since_mark(self) -> list[Value]:
        """Leave the innermost MARK; what was pushed since."""
        if not self.frames:
            self.fail("no MARK is open")
        values = self.stack
        self.stack = self.frames.pop()
        return values

    def drop(self, values: list[Value]) -> None:
        """Note that ``values`` are thrown away."""
        if self.dropped is None and any(isinstance(value, Call) for value in values):
            self.dropped = self.offset

    def remember(self, index: int) -> None:
        """Put the top of the stack into the memo."""
        self.memo[index] = self.stack[-1]

    def recall(self, index: int) -> None:
        """Push an entry of the memo."""
        if index not in self.memo:
            self.fail(f"it refers to memo entry {index}, which does not exist")
        self.stack.append(self.memo[index])

    def find(self, module: Value, name: Value) -> Global:
        """A global by name; Python 2 names become today's, as unpicklers do."""
        if not isinstance(module, str) or not isinstance(name, str):
            if isinstance(module, Call) or isinstance(name, Call):
                self.fail("the name of a global is computed by a call", unsafe=True)
            self.fail("the name of a global is not a string")
        if (module, name) in NAME_MAPPING:
            module, name = NAME_MAPPING[module, name]
        else:
            module = IMPORT_MAPPING.get(module, module)
        found = Global(module, name)
        self.globals.setdefault(found, self.offset)
        return found

    def persistent(self, pid: Value) -> Value:
        """What stands for a persistent id."""
        return PersistentRef(pid) if self._persistent is None else self._persistent(pid)

    def key(self, value: Value) -> Value:
        """``value`` as it may stand in a dict or set.

        Hashes of strings are seeded, those of 64-bit ints and of floats collide too rarely to matter; a
        larger int or a flat tuple is taken as long as few distinct ones collide; whatever could be
        costlier is wrapped in a `Key`.
        """
        kind = type(value)
        if kind in _PLAIN_KEYS:
            return value
        if kind in {list, dict, set, bytearray}:
            self.fail(f"a {kind.__name__} is used as a key")
        if isinstance(value, int):
            if value.bit_length() < 64:
                return value
        elif isinstance(value, tuple):
            if len(value) > _MAX_KEY_ITEMS or not _FLAT.issuperset(map(type, value)):
                return Key(value)
        elif not isinstance(value, complex):
            return Key(value)
        alike = self._by_hash.setdefault(hash(value), [])
        if value not in alike:
            alike.append(value)
            if len(alike) > _MAX_EQUAL_HASHES:
                self.fail("many keys are made to collide", unsafe=True)
        return value

    def extend(self, target: Value, items: list[Value]) -> None:
        """Append to a list, or note it on an object."""
        if type(target) is list:
            target.extend(items)
        elif isinstance(target, Call):
            last = target.then[-1] if target.then else None
            if isinstance(last, Extend):
                last.items.extend(items)
            else:
                target.then.append(Extend(items))
        else:
            self.fail(f"items are appended to a {type(target).__name__}", unsafe=isinstance(target, Global))

    def update(self, target: Value, flat: list[Value]) -> None:
        """Set keys on a dict, or note it on an object; ``flat`` alternates keys and values."""
        if len(flat) % 2:
            self.fail("a key comes without a value")
        pairs = zip(flat[::2], flat[1::2], strict=True)
        if type(target) is dict:
            length = len(target) + len(flat) // 2
            for key, value in pairs:
                target[key if type(key) is str else self.key(key)] = value
            # No pickler writes this; it is what a damaged name comes to.
            if len(target) != length:
                self.fail("a key is set twice")
        elif isinstance(target, Call):
            last = target.then[-1] if target.then else None
            if isinstance(last, Update):
                last.pairs.extend(pairs)
            else:
                target.then.append(Update(list(pairs)))
        else:
            self.fail(f"keys are set on a {type(target).__name__}", unsafe=isinstance(target, Global))

    def call(self, func: Value, args: Value) -> Value:
        """A `Reduce`, or the plain value that pickle spells by such a call."""
        if not isinstance(args, tuple):
            self.fail("the arguments of a call are not a tuple")
        if isinstance(func, Global):
            if func.module in {"builtins", "_codecs"}:
                plain = self._plain(func, args)
                if plain is not None:
                    return plain
        elif not isinstance(func, Call):
            self.fail(f"a {type(func).__name__} is called")
        return Reduce(func, args)

    def _plain(self, func: Global, args: tuple[Value, ...]) -> Value:
        match func.module, func.name, *args:
            case "_codecs", "encode", str(text), "latin1":
                self._spend(len(text))
                return text.encode("latin1")
            case "builtins", "bytes":
                return None if args else b""
            case "builtins", "bytearray", bytes(content):
                self._spend(len(content))
                return bytearray(content)
            case "builtins", "bytearray":
                return None if args else bytearray()
            case "builtins", "complex", float(real), float(imag):
                return complex(real, imag)
            case "builtins", "set", list(members):
                self._spend(len(members))
                return {self.key(member) for member in members}
            case "builtins", "frozenset", list(members):
                self._spend(len(members))
                return frozenset(map(self.key, members))
        return None

    def _spend(self, size: int) -> None:
        """Bound what copies of shared values add up to: a call of a few bytes can copy a megabyte."""
        self._spare -= size
        if self._spare < 0:
            self.fail("calls copy the same value over and over", unsafe=True)
