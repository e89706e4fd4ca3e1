"""The shape of a repeated item, read off the bytes of one that the machine has just run.

Pickle spells every chunk of a list and every entry of `storage_data` alike: references to classes and
attribute names that are the same in all of them, and in fixed places between these an integer, a text, or
a `torch.Size`, each in one of a few encodings. `compile_item` turns one item into `Template`, the list of
those steps, which `dcp.wire.columns` follows over many items at once. An item that is spelled in any other
way has no template and is left to the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dcp.wire.values import CHUNK, INDEX, RECORD, SIZE, Known

Kind = Literal["chunk", "entry"]
"""``chunk``: a `WireChunk` in a list. ``entry``: a `WireIndex` and its `WireRecord` in a dict."""

OBJECTS: dict[Kind, tuple[Known, ...]] = {"chunk": (CHUNK,), "entry": (INDEX, RECORD)}
_NEW = b")\x81\x94}\x94("
NEWOBJ_AT = 1
"""Where the NEWOBJ opcode stands after the class reference."""
_END = b"ub"
_AFTER_SIZE = b"\x85\x94R\x94"
_REF_WIDTH = {ord("h"): 2, ord("j"): 5}
_INT_WIDTH = {ord("K"): 2, ord("M"): 3, ord("J"): 5}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}

# Attribute -> (what may stand there, whether an item without it can have a template)
_ATTRIBUTES: dict[Known, dict[str, str]] = {
    CHUNK: {"offsets": "size", "sizes": "size"},
    INDEX: {"fqn": "text", "offset": "size?", "index": "int?"},
    RECORD: {"relative_path": "text", "offset": "int", "length": "int"},
}
_NEEDED: dict[Known, frozenset[str]] = {
    CHUNK: frozenset({"offsets", "sizes"}),
    INDEX: frozenset({"fqn", "offset"}),
    RECORD: frozenset({"relative_path", "offset", "length"}),
}


@dataclass(frozen=True, slots=True)
class Step:
    """One piece of an item.

    Attributes:
        what: ``const``, ``int``, ``int?`` (or None), ``size``, ``size?`` (or None), ``text``.
        raw: the bytes of a ``const``; for a size, the reference to `torch.Size`.
        name: ``Class.attribute`` that the value is of.
    """

    what: str
    raw: bytes = b""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Template:
    """An item as steps. ``steps[0]`` is a const that begins with the class reference and NEWOBJ."""

    kind: Kind
    steps: tuple[Step, ...]
    newobj: int
    """Offset of the first NEWOBJ opcode within the item, in bytes."""


class _NoTemplate(Exception):
    pass


def compile_item(
    kind: Kind, data: bytes, start: int, stop: int, recall: Callable[[int], object]
) -> Template | None:
    """The template of the item at ``data[start:stop]``, None if it is spelled in another way.

    Args:
        recall: an entry of the memo, None if there is none.
    """
    if not 0 <= start < stop <= len(data):
        return None
    reader = _ItemReader(data[start:stop], recall)
    try:
        for known in OBJECTS[kind]:
            reader.instance(known)
        if reader.at != len(reader.data):
            return None
    except (_NoTemplate, IndexError):
        return None
    return Template(kind, tuple(reader.finished()), _REF_WIDTH[data[start]] + NEWOBJ_AT)


class _ItemReader:
    def __init__(self, data: bytes, recall: Callable[[int], object]) -> None:
        self.data = data
        self.recall = recall
        self.at = 0
        self.const = b""
        self.steps: list[Step] = []
        self.size: bytes = b""

    def finished(self) -> list[Step]:
        self._flush()
        return [Step(s.what, self.size, s.name) if s.what.startswith("size") else s for s in self.steps]

    def instance(self, known: Known) -> None:
        if self._reference() is not known:
            raise _NoTemplate
        self._expect(_NEW)
        attributes, seen = _ATTRIBUTES[known], set()
        while not self.data.startswith(_END, self.at):
            name = self._reference()
            if type(name) is not str or name not in attributes or name in seen:
                raise _NoTemplate
            seen.add(name)
            self._flush()
            what = attributes[name]
            self._skip(what)
            self.steps.append(Step(what, name=f"{known.name}.{name}"))
        self._expect(_END)
        if not seen >= _NEEDED[known]:
            raise _NoTemplate

    def _flush(self) -> None:
        if self.const:
            self.steps.append(Step("const", self.const))
            self.const = b""

    def _expect(self, raw: bytes) -> None:
        if not self.data.startswith(raw, self.at):
            raise _NoTemplate
        self.const += raw
        self.at += len(raw)

    def _reference(self) -> object:
        raw, index = self._reference_at(self.at)
        self.const += raw
        self.at += len(raw)
        return self.recall(index)

    def _reference_at(self, at: int) -> tuple[bytes, int]:
        width = _REF_WIDTH.get(self.data[at], 0)
        raw = self.data[at : at + width]
        if not width or len(raw) < width:
            raise _NoTemplate
        return raw, int.from_bytes(raw[1:], "little")

    def _skip(self, what: str) -> None:
        opcode = self.data[self.at]
        if what.endswith("?") and opcode == ord("N"):
            self.at += 1
        elif what == "text":
            self._skip_text(opcode)
        elif what.startswith("int"):
            self._skip_int(opcode)
        else:
            self._skip_size()

    def _skip_text(self, opcode: int) -> None:
        if opcode == 0x8C:
            self.at += 3 + self.data[self.at + 1]
            if self.data[self.at - 1] != 0x94:
                raise _NoTemplate
        else:
            self.at += len(self._reference_at(self.at)[0])

    def _skip_int(self, opcode: int) -> None:
        if opcode == 0x8A:
            self.at += 2 + self.data[self.at + 1]
        elif opcode in _INT_WIDTH:
            self.at += _INT_WIDTH[opcode]
        else:
            raise _NoTemplate

    def _skip_size(self) -> None:
        raw, index = self._reference_at(self.at)
        if self.recall(index) is not SIZE or self.size not in (b"", raw):
            raise _NoTemplate
        self.size = raw
        self.at += len(raw)
        if self.data[self.at] == ord(")"):
            self.at += 1
        else:
            if self.data[self.at] == ord("("):
                self.at += 1
            while self.data[self.at] in (*_INT_WIDTH, 0x8A):
                self._skip_int(self.data[self.at])
            self.at += 2
        if not self.data.startswith(_AFTER_SIZE, self.at):
            raise _NoTemplate
        self.at += len(_AFTER_SIZE)
