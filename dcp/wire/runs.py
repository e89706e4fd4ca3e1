"""Runs: the machine skips over many items at once, exactly as if it had run each of them.

After every chunk and every storage entry the machine asks `Runs` whether items that `dcp.wire.columns` has
decoded follow directly; if so, one `Run` is put on the stack in their place, the position moves behind them
and the memo counts the entries they would have made. What they would have left in the memo is made when it
is asked for, by running the item's own bytes (`Runs.recall`).

Why nothing can tell the difference: a run stands for finished items, which no opcode can change any more;
it may only reach the list or dict it belongs to (`deliver`); and the memo is only ever appended to. A
pickle that does anything else, which no pickler writes, ends in `Restart`: it is read again without runs.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from dcp.pickles.nodes import Value
from dcp.wire.grammar import Kind, Template, compile_item
from dcp.wire.values import WireIndex

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from dcp.wire.columns import Names, Texts, Window
    from dcp.wire.machine import IndexMachine

_FEW = 32
"""Numpy is worth it from about this many items on."""
_FIRST_STRETCH, _LARGEST_STRETCH = 1 << 16, 1 << 21
_LONGEST_PAUSE = 4096
_MISSES = 32

MISSING = object()


class Restart(Exception):
    """The pickle does what runs cannot stand for."""


class Run:
    """Rows ``first <= i < last`` of a window: that many items. ``base`` is the first memo entry they make."""

    __slots__ = ("base", "first", "last", "window")

    def __init__(self, window: Window, first: int, last: int, base: int) -> None:
        self.window = window
        self.first = first
        self.last = last
        self.base = base

    def __len__(self) -> int:
        return self.last - self.first


class _Progress:
    """How the search for runs of one kind goes."""

    __slots__ = ("end", "misses", "pause", "penalty", "stretch", "template", "window")

    def __init__(self) -> None:
        self.end = -1
        """Where the last item ended, in bytes; the next one begins there unless something stands between."""
        self.template: Template | None = None
        self.window: Window | None = None
        self.stretch = _FIRST_STRETCH
        self.misses = 0
        self.pause = 0
        self.penalty = 4


class Runs:
    """What one machine has skipped, and the search for more."""

    def __init__(self) -> None:
        self._progress: dict[Kind, _Progress] = {"chunk": _Progress(), "entry": _Progress()}
        self._bases: list[int] = []
        self._runs: list[Run] = []
        self._names: Names | None = None
        self.undelivered = 0
        self.paused = False

    @property
    def names(self) -> list[str]:
        """The texts that columns refer to by number."""
        return self._names.texts if self._names is not None else []

    @property
    def skipped(self) -> int:
        """How many items were skipped."""
        return sum(map(len, self._runs))

    def __bool__(self) -> bool:
        return bool(self._runs)

    def item_done(self, m: IndexMachine, kind: Kind) -> None:
        """An item was just finished; skip those that follow it, if they can be skipped."""
        state = self._progress[kind]
        start, state.end = state.end, m.position
        if state.window is not None:
            if m.position < state.window.high:
                if self._take(m, state, state.window):
                    state.misses = 0
                    return
                state.misses += 1
                if state.misses < _MISSES:
                    return
            state.window = None
        if state.pause:
            state.pause -= 1
            return
        if self._open_window(m, state, kind, start):
            state.misses = 0
        else:
            state.pause = state.penalty
            state.penalty = min(2 * state.penalty, _LONGEST_PAUSE)

    def _open_window(self, m: IndexMachine, state: _Progress, kind: Kind, start: int) -> bool:
        def recall(index: int) -> object:
            return self.peek(m, index)

        template = compile_item(kind, m.data, start, m.position, recall) or state.template
        if template is None:
            return False
        head = template.steps[0].raw[: template.newobj + 1]
        reach = _FEW * 2 * max(m.position - start, 64)
        if m.data.count(head, m.position, m.position + reach) < _FEW:
            return False
        from dcp.wire.columns import Names, decode

        if self._names is None:
            self._names = Names()
        state.template = template
        low = m.position
        high = min(low + state.stretch, len(m.data))
        state.window = decode(m.data, low, high, template, self._names)
        rows = int(state.window.ok.sum())
        if rows < _FEW:
            state.window = None
            state.stretch = _FIRST_STRETCH
            return False
        state.penalty = 4
        state.stretch = min(4 * state.stretch, _LARGEST_STRETCH)
        self._take(m, state, state.window)
        return True

    def _take(self, m: IndexMachine, state: _Progress, window: Window) -> bool:
        first, last = window.chain(m.position)
        if first == last:
            return False
        base = m.size
        self._bases.append(base)
        self._runs.append(run := Run(window, first, last, base))
        found = [(texts, *self._resolve(m, run, texts)) for texts in window.texts.values()]
        run.last = first + min((stop for *_, stop in found), default=last - first)
        for texts, rows, numbers, _ in found:
            texts.ids[rows] = numbers
        if not len(run):
            self._bases.pop()
            self._runs.pop()
            return False
        m.size = base + int(window.memo[run.last] - window.memo[first])
        m.position = state.end = int(window.ends[run.last - 1])
        m.stack.append(run)
        self.undelivered += 1
        return True

    def _resolve(
        self, m: IndexMachine, run: Run, texts: Texts
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int32], int]:
        """Rows whose text is a reference, the numbers of those texts, and how many rows are sound."""
        import numpy as np

        assert self._names is not None
        window = run.window
        rows = np.flatnonzero(texts.ids[run.first : run.last] < 0) + run.first
        if not len(rows):
            return rows, np.empty(0, np.int32), len(run)
        refs = texts.refs[rows]
        wanted, where = np.unique(refs, return_inverse=True)
        numbers: list[int] = []
        for ref in wanted.tolist():
            value = self._text_at(m, ref)
            numbers.append(self._names.of_text(value) if type(value) is str else -1)
        found = np.array(numbers, np.int32)[where]
        # An entry of the item itself or of a later one does not exist yet.
        begins = window.memo[rows] + (run.base - int(window.memo[run.first]))
        bad = np.flatnonzero((found < 0) | (refs >= begins))
        if not len(bad):
            return rows, found, len(run)
        return rows[: bad[0]], found[: bad[0]], int(rows[bad[0]]) - run.first

    def _find(self, index: int) -> tuple[Run, int, int] | None:
        """The run, row and entry within the item that memo entry ``index`` belongs to."""
        at = bisect_right(self._bases, index) - 1
        if at < 0:
            return None
        run = self._runs[at]
        memo = run.window.memo
        within = index - run.base + int(memo[run.first])
        if within >= memo[run.last]:
            return None
        row = int(memo.searchsorted(within, "right")) - 1
        return run, row, within - int(memo[row])

    def _text_at(self, m: IndexMachine, index: int) -> object:
        """Memo entry ``index`` if it is a text."""
        value = m.memo.get(index, MISSING)
        if value is not MISSING:
            return value
        found = self._find(index)
        if found is None:
            return MISSING
        run, row, entry = found
        for texts in run.window.texts.values():
            if texts.refs[row] < 0 and texts.slots[row] == entry:
                return self.names[texts.ids[row]]
        return MISSING

    def peek(self, m: IndexMachine, index: int) -> object:
        """Memo entry ``index`` without making it, for what a template refers to."""
        value = m.memo.get(index, MISSING)
        return value if value is not MISSING else self._text_at(m, index)

    def recall(self, m: IndexMachine, index: int) -> Value:
        """Memo entry ``index``, which an item that was skipped would have made; `MISSING` if none would."""
        found = self._find(index)
        if found is None:
            return MISSING
        run, row, _ = found
        m.replay(
            int(run.window.starts[row]),
            int(run.window.ends[row]),
            run.base + int(run.window.memo[row] - run.window.memo[run.first]),
        )
        return m.memo.get(index, MISSING)

    def deliver(self, values: list[Value], kind: Kind) -> None:
        """Runs among ``values`` have reached the container of a ``kind``."""
        for value in values:
            if type(value) is Run:
                if value.window.kind != kind:
                    raise Restart
                self.undelivered -= 1

    def lost(self, m: IndexMachine) -> bool:
        """Whether a run went anywhere but to its container or still waits on the stack."""
        if not self.undelivered:
            return False
        waiting = {id(v) for values in (*m.frames, m.stack) for v in values if type(v) is Run}
        return len(waiting) < self.undelivered


def follows_key(stack: list[Value]) -> bool:
    """Whether the record on top of the stack stands after the key it belongs to."""
    return len(stack) > 1 and type(stack[-2]) is WireIndex
