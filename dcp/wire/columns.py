"""Many items of one template decoded at once, by cursors that move through the bytes in step.

`decode` finds every place in a stretch of the pickle where an item may begin and follows the template from
all of them together: one numpy operation a step instead of some twenty opcodes an item. What comes out is
a `Window`: for each candidate whether it is an item (``ok``), where it ends, how many memo entries it
makes, and its values as columns. Whether a candidate is ever *reached* is for `dcp.wire.runs` to say; a
byte sequence inside a text that looks like an item is decoded here and never used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dcp.wire.grammar import Kind, Step, Template

Ints: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]

MAX_DIMS = 8
"""Most dimensions decoded here; items with more are left to the machine."""
_MARGIN = 16
"""No cursor reads further than this many bytes beyond itself."""

_WIDTH = np.zeros(256, np.int64)
_VALUE = np.zeros(256, np.uint64)
for _opcode, _bytes in ((b"K", 1), (b"M", 2), (b"J", 4)):
    _WIDTH[ord(_opcode)] = 1 + _bytes
    _VALUE[ord(_opcode)] = (1 << 8 * _bytes) - 1


class Names:
    """Texts met so far, by number, so that a column can hold them."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._by_bytes: dict[bytes, int] = {}
        self._by_text: dict[str, int] = {}

    def of_text(self, text: str) -> int:
        """The number of ``text``."""
        number = self._by_text.get(text)
        if number is None:
            number = self._by_text[text] = len(self.texts)
            self.texts.append(text)
        return number

    def of_slices(self, data: bytes, starts: list[int], ends: list[int]) -> list[int]:
        """The numbers of encoded texts, -1 for one that is not UTF-8."""
        known = self._by_bytes
        raws = [data[start:end] for start, end in zip(starts, ends, strict=True)]
        for raw in set(raws).difference(known):
            try:
                known[raw] = self.of_text(raw.decode("utf-8", "surrogatepass"))
            except UnicodeDecodeError:
                known[raw] = -1
        return [known[raw] for raw in raws]


@dataclass(slots=True)
class Texts:
    """A column of texts. Row ``i`` is text ``ids[i]`` or, while that is -1, memo entry ``refs[i]``."""

    ids: npt.NDArray[np.int32]
    refs: Ints
    slots: npt.NDArray[np.int16]
    """For a text written in place, which of the item's memo entries it becomes."""


@dataclass(slots=True)
class Shapes:
    """A column of sizes: row ``i`` is ``values[i, :dims[i]]``, or None where ``dims[i]`` is -1."""

    dims: npt.NDArray[np.int8]
    values: Ints


@dataclass(slots=True)
class Window:
    """Decoded candidates in ``[low, high)`` of the pickle, in order of position."""

    kind: Kind
    high: int
    starts: Ints
    ends: Ints
    ok: Mask
    memo: Ints
    """Memo entries made by all candidates before each row; one longer than there are rows."""
    breaks: Ints
    """Rows after which the next row does not directly follow, in order; the last row is one."""
    texts: dict[str, Texts]
    ints: dict[str, Ints]
    shapes: dict[str, Shapes]

    def chain(self, position: int) -> tuple[int, int]:
        """Rows ``first <= i < last`` of the unbroken sequence of items that begins at ``position``."""
        row = int(self.starts.searchsorted(position))
        if row == len(self.starts) or self.starts[row] != position or not self.ok[row]:
            return row, row
        return row, int(self.breaks[self.breaks.searchsorted(row)]) + 1


def decode(data: bytes, low: int, high: int, template: Template, names: Names) -> Window:
    """Follow ``template`` from every possible beginning in ``data[low:high]``."""
    decoder = _Decoder(data, low, high, template, names)
    for step in template.steps:
        decoder.step(step)
    return decoder.window(template.kind, high)


class _Decoder:
    def __init__(self, data: bytes, low: int, high: int, template: Template, names: Names) -> None:
        self.data = data
        self.names = names
        self.bytes = np.frombuffer(data, np.uint8)
        self.words: npt.NDArray[np.uint64] = np.ndarray(
            (max(len(data) - 7, 0),), "<u8", buffer=data, strides=(1,)
        )
        self.top = max(len(data) - _MARGIN, 0)
        newobj = template.newobj
        starts = np.flatnonzero(self.bytes[low + newobj : high + newobj] == 0x81).astype(np.int64) + low
        self.cursor = starts[starts < self.top]
        self.ok = np.ones(len(self.cursor), np.bool_)
        self._const(template.steps[0].raw)
        self.starts = self.cursor = self.cursor[self.ok] - len(template.steps[0].raw)
        self.ok = np.ones(len(self.starts), np.bool_)
        self.made = np.zeros(len(self.starts), np.int16)
        self.texts: dict[str, Texts] = {}
        self.ints: dict[str, Ints] = {}
        self.shapes: dict[str, Shapes] = {}

    def window(self, kind: Kind, high: int) -> Window:
        count = len(self.starts)
        self.ok &= self.cursor <= self.top
        linked = self.ok[:-1] & self.ok[1:] & (self.cursor[:-1] == self.starts[1:])
        breaks = np.append(np.flatnonzero(~linked), max(count - 1, 0))
        memo = np.zeros(count + 1, np.int64)
        np.cumsum(self.made, out=memo[1:])
        return Window(
            kind, high, self.starts, self.cursor, self.ok, memo, breaks, self.texts, self.ints, self.shapes
        )

    def step(self, step: Step) -> None:
        if step.what == "const":
            self._const(step.raw)
            self.made += step.raw.count(b")\x81\x94}\x94(") * 2
        elif step.what == "text":
            self._text(step.name)
        elif step.what.startswith("int"):
            self._int_step(step)
        else:
            self._size(step)

    def _byte(self, ahead: int | Ints = 0) -> npt.NDArray[np.uint8]:
        found: npt.NDArray[np.uint8] = self.bytes[np.minimum(self.cursor + ahead, self.top + 8)]
        return found

    def _word(self, at: Ints) -> npt.NDArray[np.uint64]:
        return self.words[np.minimum(at, self.top + 8)]

    def _const(self, raw: bytes) -> None:
        for begin in range(0, len(raw), 8):
            part = raw[begin : begin + 8]
            mask = np.uint64((1 << 8 * len(part)) - 1)
            word = self._word(self.cursor + begin)
            self.ok &= (word & mask) == np.uint64(int.from_bytes(part, "little"))
        self.cursor = self.cursor + len(raw)

    def _int(self, opcode: npt.NDArray[np.uint8]) -> tuple[Ints, Ints]:
        """Integers at the cursors, and how many bytes each takes, 0 where there is none."""
        word = self._word(self.cursor + 1)
        width = _WIDTH[opcode]
        value = (word & _VALUE[opcode]).astype(np.int64)
        negative = (opcode == ord("J")) & (value >= 1 << 31)
        value[negative] -= 1 << 32
        long = np.flatnonzero(opcode == 0x8A)
        if len(long):
            count = (word[long] & np.uint64(0xFF)).astype(np.int64)
            fits = (count >= 1) & (count <= 8)
            long, count = long[fits], count[fits]
            shift = 8 * (8 - count)
            raw = self._word(self.cursor[long] + 2) << shift.astype(np.uint64)
            value[long] = raw.view(np.int64) >> shift
            width[long] = 2 + count
        return value, width

    def _int_step(self, step: Step) -> None:
        opcode = self._byte()
        value, width = self._int(opcode)
        if step.what.endswith("?"):
            # Only the index hint of `MetadataIndex`, whose value nothing depends on.
            width[opcode == ord("N")] = 1
        else:
            self.ints[step.name] = value
        self.ok &= width > 0
        self.cursor = self.cursor + width

    def _text(self, name: str) -> None:
        opcode = self._byte()
        length = self._byte(1).astype(np.int64)
        inline = opcode == 0x8C
        short = opcode == ord("h")
        long = opcode == ord("j")
        refs = np.full(len(opcode), -1, np.int64)
        refs[short] = length[short]
        refs[long] = (self._word(self.cursor[long] + 1) & np.uint64(0xFFFFFFFF)).astype(np.int64)
        self.ok &= inline & (self._byte(length + 2) == 0x94) | short | long
        ids = np.full(len(opcode), -1, np.int32)
        rows = np.flatnonzero(inline & self.ok & (self.cursor + length + 3 <= self.top))
        begin = self.cursor[rows] + 2
        ids[rows] = self.names.of_slices(self.data, begin.tolist(), (begin + length[rows]).tolist())
        self.ok &= (ids >= 0) | short | long
        self.texts[name] = Texts(ids, refs, self.made.copy())
        self.made += inline
        width = np.where(inline, length + 3, 0)
        width[short] = 2
        width[long] = 5
        self.cursor = self.cursor + width

    def _size(self, step: Step) -> None:
        none = self._byte() == ord("N") if step.what.endswith("?") else np.zeros(len(self.ok), np.bool_)
        before, ok = self.cursor, self.ok.copy()
        self._const(step.raw)
        first = self._byte()
        empty = first == ord(")")
        marked = first == ord("(")
        self.cursor = self.cursor + marked
        dims = np.zeros(len(first), np.int8)
        columns: list[Ints] = []
        active = np.ones(len(first), np.bool_)
        for _ in range(MAX_DIMS):
            opcode = self._byte()
            value, width = self._int(opcode)
            width[~active] = 0
            active = width > 0
            if not active.any():
                break
            value[~active] = 0
            columns.append(value)
            dims += active
            self.cursor = self.cursor + width
        closing = np.where(marked, ord("t"), np.where(empty, ord(")"), dims.astype(np.int64) + 0x84))
        self.ok &= (self._byte() == closing) & (empty | marked | (dims >= 1) & (dims <= 3))
        self.ok &= ~(marked | empty) | (marked & (dims > 0)) | (empty & (dims == 0))
        self.ok &= empty | (self._byte(1) == 0x94)
        self.cursor = self.cursor + np.where(empty, 1, 2)
        self._const(b"\x85\x94R\x94")
        made = np.where(empty, 2, 3).astype(np.int16)
        # None instead of a size: one byte, no entry in the memo.
        self.ok = np.where(none, ok, self.ok)
        self.cursor = np.where(none, before + 1, self.cursor)
        dims[none] = -1
        self.made += np.where(none, 0, made).astype(np.int16)
        values = np.stack(columns, axis=1) if columns else np.zeros((len(dims), 0), np.int64)
        self.shapes[step.name] = Shapes(dims, values)
