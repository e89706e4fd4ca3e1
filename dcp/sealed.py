"""Classes that an unpickler may hand out: building an instance only stores values, and the class is sealed.

A pickle can set attributes of whatever object it holds, classes included. The metaclass `Sealed` refuses that
once `seal` has been called, so that what one file says can never change how another is read.
"""

from __future__ import annotations

import pickle
from typing import NoReturn, TypeVar

C = TypeVar("C", bound=type)

INTEGERS = frozenset({int})
"""For ``INTEGERS.issuperset(map(type, values))``: all are exact ints, no bools among them."""

_sealed: set[type] = set()


class Sealed(type):
    """Metaclass whose classes cannot be changed after `seal`."""

    def __setattr__(cls, name: str, value: object) -> None:
        if cls in _sealed:
            raise pickle.UnpicklingError(f"attribute {name!r} set on a class")
        super().__setattr__(name, value)


def seal(cls: C) -> C:
    """Class decorator, outermost: from here on the class cannot be changed."""
    _sealed.add(cls)
    return cls


def malformed(what: str) -> NoReturn:
    """Refuse a state that the class cannot have."""
    raise pickle.UnpicklingError(what)
