"""Inert nodes: what a pickle asks for, as data.

A value read from a pickle is built of plain Python values (None, bool, int, float, complex, str, bytes,
bytearray, list, tuple, dict, set, frozenset, which stand for themselves) and of the nodes here, which
stand for what an unpickler would import, call or fetch. Nodes compare by identity, except `Global`, which
is a name; so the sharing in the pickle can be seen and written again. What is done to an object after its
creation is kept in order in ``then``. Treat everything as read-only once it has been read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

Value: TypeAlias = object
"""A plain value or a node."""


@dataclass(frozen=True, slots=True)
class Global:
    """A module-level name, which an unpickler would import. ``name`` with dots is an attribute walk."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True, eq=False)
class Extend:
    """Items appended to an object that is not a plain list."""

    items: list[Value]


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """``object[key] = value`` for each pair, in order, on an object that is not a plain dict."""

    pairs: list[tuple[Value, Value]]


@dataclass(frozen=True, slots=True, eq=False)
class Build:
    """State handed to ``__setstate__`` or merged into ``__dict__``."""

    state: Value


Step: TypeAlias = Extend | Update | Build


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Call:
    """Base of the nodes that stand for a new object."""

    func: Global | Call
    args: tuple[Value, ...]
    then: list[Step] = field(default_factory=list, kw_only=True)

    @property
    def items(self) -> list[Value]:
        """Everything appended to the object."""
        return [item for step in self.then if isinstance(step, Extend) for item in step.items]

    @property
    def pairs(self) -> list[tuple[Value, Value]]:
        """Every key and value set on the object, in order; a key set twice is there twice."""
        return [pair for step in self.then if isinstance(step, Update) for pair in step.pairs]

    @property
    def state(self) -> Value:
        """The last state given to the object, None if there is none."""
        return next((step.state for step in reversed(self.then) if isinstance(step, Build)), None)

    def __repr__(self) -> str:
        func = self.func if isinstance(self.func, Global) else f"<{type(self.func).__name__}>"
        return f"{type(self).__name__}({func}, {len(self.args)} arguments, {len(self.then)} steps)"

    def calls(self, name: str) -> bool:
        """Whether the object is made by the global of this full name."""
        return isinstance(self.func, Global) and str(self.func) == name


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Reduce(Call):
    """``func(*args)``."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class NewObj(Call):
    """``func.__new__(func, *args, **kwargs)``; ``func`` is a class."""

    kwargs: dict[Value, Value] | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True, eq=False)
class PersistentRef:
    """Something kept outside the pickle; for torch ``("storage", type, key, location, elements)``."""

    pid: Value


@dataclass(frozen=True, slots=True, eq=False)
class Key:
    """A dict key or set member whose own hash might cost exponential time: kept by identity instead."""

    value: Value
