"""Walking values without recursion: neither depth nor sharing can hurt.

`children` lists what a value directly holds, `walk` visits everything once, and `check` proves that a
value is a finite tree with some parts shared, so that what comes after may recurse over it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from dcp.errors import PickleError
from dcp.pickles.nodes import Build, Call, Extend, Key, NewObj, PersistentRef, Reduce, Update, Value

_LEAVES = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})


def children(value: Value) -> Iterator[Value]:
    """The values that ``value`` directly holds, in the order in which they are pickled."""
    kind = type(value)
    if kind in _LEAVES:
        return iter(())
    if isinstance(value, dict):
        return chain.from_iterable(value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return iter(value)
    if isinstance(value, Call):
        return _parts(value)
    if isinstance(value, PersistentRef):
        return iter((value.pid,))
    if isinstance(value, Key):
        return iter((value.value,))
    return iter(())


def _parts(call: Call) -> Iterator[Value]:
    yield call.func
    yield from call.args
    if isinstance(call, NewObj) and call.kwargs is not None:
        yield call.kwargs
    for step in call.then:
        if isinstance(step, Extend):
            yield from step.items
        elif isinstance(step, Update):
            yield from chain.from_iterable(step.pairs)
        elif isinstance(step, Build):
            yield step.state


def walk(root: Value) -> Iterator[Value]:
    """Every value reachable from ``root``, parents first; containers and nodes that are shared come once."""
    if type(root) in _LEAVES:
        yield root
        return
    seen = {id(root)}
    yield root
    open_ = [children(root)]
    while open_:
        for child in open_[-1]:
            if type(child) in _LEAVES:
                yield child
            elif id(child) not in seen:
                seen.add(id(child))
                yield child
                open_.append(children(child))
                break
        else:
            open_.pop()


_BRANCHES = frozenset({list, tuple, dict, set, frozenset, Reduce, NewObj, PersistentRef, Key})


def check(root: Value, *, max_depth: int, max_size: int) -> None:
    """Refuse a value that holds itself, nests too deeply, or grows beyond measure when sharing is undone.

    Args:
        max_depth: deepest nesting of containers and nodes.
        max_size: most values that a walk which ignores sharing would meet.

    Raises:
        PickleError: with what is wrong.
    """
    if type(root) not in _BRANCHES:
        return
    # id -> (depth below, values within) of finished branches, None while a branch is open. Nothing is
    # freed meanwhile, so ids do not come twice.
    done: dict[int, tuple[int, int] | None] = {id(root): None}
    path = [_Open(root)]
    while path:
        here = path[-1]
        for child in here.rest:
            if type(child) not in _BRANCHES:
                here.size += 1
                continue
            mark = id(child)
            if mark not in done:
                if len(path) >= max_depth:
                    raise PickleError(f"the pickle nests deeper than {max_depth} levels")
                done[mark] = None
                path.append(_Open(child))
                break
            below = done[mark]
            if below is None:
                raise PickleError("a value in the pickle contains itself; such values are not read")
            here.add(*below)
        else:
            path.pop()
            if len(path) + here.depth > max_depth:
                raise PickleError(f"the pickle nests deeper than {max_depth} levels")
            if here.size > max_size:
                raise PickleError(f"the pickle unfolds to over {max_size:,} values through shared references")
            done[here.mark] = here.depth, here.size
            if path:
                path[-1].add(here.depth, here.size)


class _Open:
    """A branch being counted: what is left of it, its depth and its size so far."""

    __slots__ = ("depth", "mark", "rest", "size")

    def __init__(self, branch: Value) -> None:
        self.mark = id(branch)
        self.rest = children(branch)
        self.depth = 1
        self.size = 1

    def add(self, depth: int, size: int) -> None:
        """Count a finished branch below this one."""
        if depth >= self.depth:
            self.depth = depth + 1
        self.size += size
