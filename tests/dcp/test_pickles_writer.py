import enum
import pickle
import pickletools
from collections import OrderedDict
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp.errors import UsageError
from dcp.pickles.nodes import Build, Extend, Global, NewObj, PersistentRef, Reduce, Update
from dcp.pickles.reader import read
from dcp.pickles.writer import write
from tests.support.states import archive_pickle

_SHARED = ["shared", "latin1", b"shared bytes", bytearray(b"b"), (1, 2), ("t", [0]), 3j, frozenset({1})]

_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 3000), 1 << 3000),
    st.sampled_from(
        [0, 255, 256, 65535, 65536, -1, (1 << 31) - 1, 1 << 31, -(1 << 31), -(1 << 31) - 1, -128]
    ),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.text(st.characters(codec=None)),
    st.binary(),
    st.binary().map(bytearray),
    st.sets(st.integers() | st.text()),
    st.frozensets(st.integers() | st.binary()),
    st.sampled_from(_SHARED),
)
_keys = st.text() | st.integers() | st.tuples(st.text(), st.integers())
values = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(_keys, inner),
        st.dictionaries(_keys, inner).map(OrderedDict),
        inner.map(lambda value: [value, value]),
    ),
    max_leaves=40,
)


@given(values)
def test_the_bytes_are_pythons(value: object) -> None:
    assert write(value) == pickle.dumps(value, 2)


@pytest.mark.parametrize("size", [0, 1, 2, 255, 256, 257, 999, 1000, 1001, 1999, 2000, 2001, 70_000])
def test_batches_are_pythons(size: int) -> None:
    for value in (
        list(range(size)),
        dict.fromkeys(range(size)),
        OrderedDict.fromkeys(range(size)),
        [str(number) for number in range(size)],
        tuple(range(size)),
        set(range(size)),
    ):
        assert write(value) == pickle.dumps(value, 2)


def test_attributes_of_an_ordered_dict() -> None:
    value = torch.nn.Linear(2, 2).state_dict()
    value["weight"] = value["bias"] = 0
    assert write(value) == pickle.dumps(value, 2)


class Colour(enum.Enum):
    RED = 1


class Slotted:
    __slots__ = ("a",)

    def __init__(self) -> None:
        self.a = [1]


class Listed(list):
    pass


def _objects() -> list[object]:
    listed = Listed(range(1001))
    listed.note = "x"
    return [
        datetime(2024, 1, 1, tzinfo=UTC),
        Decimal("1.5"),
        Fraction(1, 3),
        PurePosixPath("some/where"),
        np.arange(7.0),
        np.int16(4),
        Colour.RED,
        Slotted(),
        listed,
        range(5),
        Listed(),
        OrderedDict,
        int,
    ]


@pytest.mark.parametrize("number", range(len(_objects())))
def test_objects_are_written_again_as_they_were(number: int) -> None:
    data = pickle.dumps([_objects()[number]] * 2, 2)
    assert write(read(data)) == data


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_objects_of_any_protocol_load_again(protocol: int) -> None:
    objects = [value for value in _objects() if not isinstance(value, Slotted) or protocol > 1]
    loaded = pickle.loads(write(read(pickle.dumps(objects, protocol))))
    for before, after in zip(objects, loaded, strict=True):
        if isinstance(before, np.ndarray):
            np.testing.assert_array_equal(before, after)
        elif isinstance(before, Slotted):
            assert after.a == before.a
        else:
            assert after == before
            assert getattr(after, "note", None) == getattr(before, "note", None)


def test_torch_pickles_are_written_again_as_they_were() -> None:
    shared = torch.arange(10.0)
    state = {
        "weights": OrderedDict(first=shared[2:], second=shared, third=shared),
        "parameter": torch.nn.Parameter(torch.zeros(2)),
        "float8": torch.zeros(2, dtype=torch.float8_e4m3fn),
        "sizes": [torch.Size([1]), torch.float16, torch.device("cpu"), torch.eye(2).to_sparse()],
        "conjugated": torch.zeros(2, dtype=torch.complex64).conj(),
        "model": torch.nn.Linear(3, 4).state_dict(),
    }
    data = archive_pickle(state)
    assert write(read(data)) == data


class Outer:
    class Inner:
        pass


def test_nested_names_are_walked_as_python_does() -> None:
    assert write([Global(__name__, "Outer.Inner")] * 2) == pickle.dumps([Outer.Inner] * 2, 2)


def test_names_of_python_2() -> None:
    assert b"c__builtin__\nxrange\n" in write(Global("builtins", "range"))
    assert b"ccopy_reg\n" in write(Global("copyreg", "_reconstructor"))


def test_steps_keep_their_order() -> None:
    node = Reduce(Global("m", "f"), ())
    node.then.extend([Build({"s": 1}), Extend([1]), Update([("k", 2)]), Extend([3, 4])])
    again = read(write(node))
    assert isinstance(again, Reduce)
    assert [type(step) for step in again.then] == [Build, Extend, Update, Extend]
    assert (again.items, again.pairs, again.state) == ([1, 3, 4], [("k", 2)], {"s": 1})


def test_new_objects_with_keywords() -> None:
    again = read(write(NewObj(Global("m", "C"), (1,), kwargs={"k": 2})))
    assert isinstance(again, NewObj)
    assert (again.args, again.kwargs) == ((1,), {"k": 2})


def test_costly_keys_are_unwrapped() -> None:
    value = {(("a",), 1): "x"}
    data = pickle.dumps(value, 2)
    assert write(read(data)) == data


def test_persistent_ids() -> None:
    node = PersistentRef(("storage", "k"))
    again = read(write([node, node]))
    assert isinstance(again, list)
    assert [ref.pid for ref in again] == [("storage", "k")] * 2


@pytest.mark.parametrize("kind", [list, tuple, OrderedDict])
def test_depth_costs_no_recursion(kind: type) -> None:
    value: object = None
    for _ in range(200_000):
        value = kind([("k", value)]) if kind is OrderedDict else kind([value])
    data = write(value)
    assert sum(1 for _ in pickletools.genops(data)) > 400_000


def test_deep_nodes_cost_no_recursion() -> None:
    value: object = None
    for _ in range(100_000):
        value = Reduce(Global("m", "f"), (PersistentRef(value),))
    opcodes = [opcode.name for opcode, _, _ in pickletools.genops(write(value))]
    assert opcodes.count("BINPERSID") == opcodes.count("REDUCE") == 100_000


def _loop(kind: str) -> object:
    inside: list[object] = []
    match kind:
        case "list":
            inside.append(inside)
        case "dict":
            inside.append({"k": inside})
        case "tuple":
            inside.append((inside,))
            return inside[0]
        case "arguments":
            node = Reduce(Global("m", "f"), (inside,))
            inside.append(node)
            return node
        case "state":
            node = Reduce(Global("m", "f"), ())
            node.then.append(Build(node))
            return node
    return inside


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["list", "dict", "tuple", "arguments", "state"])
def test_what_contains_itself_is_refused(kind: str) -> None:
    with pytest.raises(UsageError, match="contains itself"):
        write(_loop(kind))


UNSPELT = {
    "object": object(),
    "subclass of list": Listed(),
    "array": np.zeros(1),
    "fraction inside": [1, {"a": Fraction(1)}],
    "name with newlines": Global("os\nsystem\n(", "x"),
    "name beyond ascii": Global("m", "ü"),
}


@pytest.mark.parametrize("name", UNSPELT)
def test_what_has_no_spelling_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="spelling"):
        write(UNSPELT[name])


def test_other_objects_are_expanded_once() -> None:
    asked = []

    def expand(value: object) -> object:
        asked.append(value)
        return Reduce(Global("m", "f"), (1,))

    one, two = Fraction(1), Fraction(2)
    again = read(write([one, two, one], expand=expand))
    assert asked == [one, two]
    assert isinstance(again, list)
    assert again[0] is again[2]
    assert again[0] is not again[1]
