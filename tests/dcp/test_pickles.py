import io
import pickle
import random
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import PurePosixPath

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp.errors import PickleError
from dcp.pickles.graph import walk
from dcp.pickles.nodes import Build, Global, Key, NewObj, PersistentRef, Reduce, Update, Value
from dcp.pickles.reader import read
from dcp.pickles.scan import scan
from dcp.pickles.tensors import StorageNode, TensorNode, is_tensor, tensor_of
from tests.support.states import archive_pickle

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)

_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 4000), 1 << 4000),
    st.floats(allow_nan=False),
    st.text(),
    st.text(st.characters(codec=None)),
    st.binary(),
)
_keys = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.tuples(st.text(), st.integers()),
)
_leaves = st.one_of(
    _scalars,
    st.complex_numbers(allow_nan=False),
    st.binary().map(bytearray),
    st.sets(_keys),
    st.frozensets(_keys),
)
values = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner, max_size=5).map(tuple), st.dictionaries(_keys, inner)
    ),
    max_leaves=30,
)


def alike(left: object, right: object) -> bool:
    """Equal, and of equal types all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(alike, left, right))
    if isinstance(left, dict):
        return alike(list(left.items()), list(right.items()))
    return left == right


@given(values, st.sampled_from(PROTOCOLS))
def test_plain_values_come_back(value: object, protocol: int) -> None:
    assert alike(read(pickle.dumps(value, protocol)), value)


@given(values, st.sampled_from(PROTOCOLS))
def test_pickles_by_the_pure_python_pickler_too(value: object, protocol: int) -> None:
    assert alike(read(pickle._dumps(value, protocol)), value)


@pytest.mark.parametrize("size", [999, 1000, 1001, 2000, 70_000])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_batches_and_long_memos(size: int, protocol: int) -> None:
    value = {"list": [(i, str(i)) for i in range(size)], "dict": {str(i): i for i in range(size)}}
    assert alike(read(pickle.dumps(value, protocol)), value)


def test_shared_values_are_shared() -> None:
    shared = ["x"]
    first, second = read(pickle.dumps([shared, shared], 2))
    assert first is second


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_objects_become_nodes(protocol: int) -> None:
    value = read(pickle.dumps(PurePosixPath("a/b"), protocol))
    assert isinstance(value, Reduce)
    assert str(value.func).startswith("pathlib.")
    assert value.args == ("a", "b")


def test_what_is_done_to_an_object_is_kept_in_order() -> None:
    ordered = OrderedDict(a=1, b=2)
    ordered.note = "n"
    value = read(pickle.dumps(ordered, 2))
    assert isinstance(value, Reduce)
    assert value.calls("collections.OrderedDict")
    assert [type(step) for step in value.then] == [Update, Build]
    assert value.pairs == [("a", 1), ("b", 2)]
    assert value.state == {"note": "n"}
    assert value.items == []


class _WithKeywords:
    def __getnewargs_ex__(self) -> tuple[tuple[int, ...], dict[str, int]]:
        return (1,), {"two": 2}

    def __new__(cls, one: int = 1, *, two: int = 2) -> "_WithKeywords":
        made = super().__new__(cls)
        made.both = (one, two)
        return made


def test_new_objects_keep_class_and_arguments() -> None:
    value = read(pickle.dumps(_WithKeywords(), 4))
    assert isinstance(value, NewObj)
    assert value.func == Global(__name__, "_WithKeywords")
    assert value.args == (1,)
    assert value.kwargs == {"two": 2}


def test_numpy_arrays_and_dates_are_nodes() -> None:
    array, date = read(pickle.dumps([np.arange(3), datetime(2024, 1, 2, tzinfo=UTC)], 2))
    assert str(array.func).endswith("multiarray._reconstruct")
    assert np.arange(3).tobytes() in array.state
    assert str(date.func) == "datetime.datetime"


def test_python_2_names_become_todays() -> None:
    assert read(b"c__builtin__\nxrange\n.") == Global("builtins", "range")
    assert read(b"ccopy_reg\n_reconstructor\n.") == Global("copyreg", "_reconstructor")
    assert read(b"\x80\x02U\x03abcU\x02\xff\x00\x86.") == ("abc", b"\xff\x00")
    assert read(b"S'it\\'s \\x41\\101\\n\\q'\n.") == "it's AA\n\\q"


def test_old_class_instances() -> None:
    value = read(b"(imodule\nClass\n.")
    assert isinstance(value, Reduce)
    assert value.func == Global("module", "Class")
    assert value.args == ()
    value = read(b"(cmodule\nClass\nK\x01o.")
    assert isinstance(value, Reduce)
    assert value.args == (1,)


def test_persistent_ids() -> None:
    value = read(b"\x80\x02X\x01\x00\x00\x00kQ.")
    assert isinstance(value, PersistentRef)
    assert value.pid == "k"
    assert read(b"Pthere\n.", persistent=lambda pid: [pid]) == ["there"]


def test_costly_keys_are_kept_by_identity() -> None:
    nested = (("a", 1), ("b", (2, 3)))
    value = read(pickle.dumps({nested: "x", frozenset({1}): "y", ("flat", 1): "z"}, 4))
    assert isinstance(value, dict)
    first, second, third = value
    assert isinstance(first, Key)
    assert first.value == nested
    assert isinstance(second, Key)
    assert second.value == frozenset({1})
    assert third == ("flat", 1)


# Hostile input


def _dumps(value: object) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def _self_containing() -> bytes:
    loop: list[object] = []
    loop.append({"inside": (loop,)})
    return pickle.dumps(loop, 2)


def _billion_laughs(depth: int) -> bytes:
    """A list of ten times the same list of ten times the same list ..."""
    inner = b"]"
    for _ in range(depth):
        inner = b"](" + inner + b"2" * 9 + b"e"
    return inner


_BIG = (1 << 61) - 1
HOSTILE = {
    "empty": b"",
    "no end": pickle.dumps([1, 2, 3])[:-1],
    "unknown opcode": b"\x80\x02\xffN.",
    "protocol 9": b"\x80\x09N.",
    "stack underflow": b"\x80\x02\x86.",
    "append below a mark": b"](K\x01a.",
    "no mark": b"\x80\x02Nt.",
    "memo miss": b"\x80\x02h\x07.",
    "memo miss, long": b"\x80\x02j\xff\xff\xff\xff.",
    "BINUNICODE8 of 2^63 bytes": b"\x8d" + struct.pack("<Q", 1 << 63) + b"x.",
    "BINBYTES8 of 2^62 bytes": b"\x8e" + struct.pack("<Q", 1 << 62) + b"x.",
    "BYTEARRAY8 of 2^40 bytes": b"\x96" + struct.pack("<Q", 1 << 40) + b"x.",
    "BINSTRING of 4 GiB": b"T\xff\xff\xff\xffx.",
    "frame of 2^63 bytes": b"\x80\x04\x95" + struct.pack("<Q", 1 << 63) + b"N.",
    "LONG4 of negative length": b"\x8b\xff\xff\xff\xffN.",
    "LONG4 of 2 GiB": b"\x8b\xff\xff\xff\x7fx.",
    "LONG4 of a megabyte": b"\x8b" + struct.pack("<i", 1 << 20) + bytes(1 << 20) + b".",
    "LONG of a million digits": b"L" + b"9" * 1_000_000 + b"L\n.",
    "FLOAT of a million digits": b"F" + b"9" * 1_000_000 + b"\n.",
    "extension registry, 1": b"\x80\x02\x82\x01.",
    "extension registry, 2": b"\x80\x02\x83\x01\x00.",
    "extension registry, 4": b"\x80\x02\x84\x01\x00\x00\x00.",
    "buffers elsewhere": b"\x80\x05\x97.",
    "state on a class": b"\x80\x02cargparse\nNamespace\n" + _dumps((None, {"__eq__": 1})) + b"b.",
    "state on a dict": b"\x80\x02}}b.",
    "items on a class": b"\x80\x02ccollections\nUserList\n(K\x01e.",
    "append to a class": b"\x80\x02ccollections\nUserList\nK\x01a.",
    "keys on a class": b"\x80\x02ccollections\nUserDict\nK\x01K\x02s.",
    "computed name": b"\x80\x04\x8c\x02os" + b"\x8c\x08builtins\x8c\x03str\x93" + b"\x8c\x06system\x85R\x93.",
    "name that is a number": b"\x80\x04K\x01K\x02\x93.",
    "call of a string": b"\x80\x02X\x01\x00\x00\x00x)R.",
    "call with a list": b"\x80\x02cbuiltins\nprint\n]R.",
    "list as a key": b"\x80\x02}]K\x01s.",
    "key without value": b"\x80\x02}(K\x01u.",
    "thrown-away call": b"\x80\x02cos\nsystem\n" + _dumps(("true",)) + b"R0N.",
    "call left on the stack": b"\x80\x02cos\nsystem\n" + _dumps(("true",)) + b"RN.",
    "list in itself": _self_containing(),
    "a million tuples deep": b")" + b"\x85" * 1_000_000 + b".",
    "a million lists deep": b"]" * 1_000_001 + b"a" * 1_000_000 + b".",
    "a million marks": b"(" * 1_000_000 + b"t" * 1_000_000 + b".",
    "calls of calls": b"\x80\x02cm\nf\n" + b")R" * 100_000 + b".",
    "key of 2^60 parts": b"\x80\x02})" + b"2\x86" * 60 + b"Ns.",
    "a list of 10^40 items": b"\x80\x02" + _billion_laughs(40) + b".",
    "colliding ints": b"\x80\x02}(" + b"".join(_dumps(i * _BIG) + b"N" for i in range(100_000)) + b"u.",
    "copies of copies": b"\x80\x02(" + b"cbuiltins\nbytearray\nq\x000"
    + b"B" + struct.pack("<I", 1 << 20) + bytes(1 << 20) + b"\x85q\x010"
    + b"h\x00h\x01R" * 1000 + b"t.",
    "not utf-8": b"X\x01\x00\x00\x00\xff.",
    "name without end": b"cos\nsystem",
    "quoteless string": b"Sabc\n.",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.timeout(20)
def test_hostile_pickles_are_refused(name: str) -> None:
    with pytest.raises(PickleError):
        read(HOSTILE[name])


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.timeout(20)
def test_scanning_hostile_pickles_ends(name: str) -> None:
    scan(HOSTILE[name])


def test_a_refusal_says_where_and_what() -> None:
    with pytest.raises(PickleError, match="byte 2: 4,294,967,295 bytes are announced, 1 are left") as caught:
        read(b"\x80\x02T\xff\xff\xff\xff.")
    assert caught.value.detail == {"offset": 2}
    assert caught.value.code == "records.undecodable"


@pytest.mark.parametrize(
    "name", ["extension registry, 1", "state on a class", "computed name", "colliding ints"]
)
def test_what_only_an_attack_does_is_unsafe(name: str) -> None:
    with pytest.raises(PickleError) as caught:
        read(HOSTILE[name])
    assert caught.value.code == "records.unsafe"


def test_nothing_is_imported_or_called() -> None:
    module = "antigravity"
    assert module not in sys.modules
    value = read(b"\x80\x02cantigravity\nfly\n)R.")
    assert isinstance(value, Reduce)
    assert value.func == Global(module, "fly")
    assert module not in sys.modules


def test_depth_is_bounded_where_asked() -> None:
    deep = pickle.dumps([[[[]]]])
    assert read(deep, max_depth=4) == [[[[]]]]
    with pytest.raises(PickleError, match="deeper than 3"):
        read(deep, max_depth=3)


def test_depth_counts_through_shared_parts() -> None:
    """The deep part is met first where it is shallow, then again at the bottom of the rest."""
    part: list[object] = []
    for _ in range(300):
        part = [part]
    rest: list[object] = part
    for _ in range(300):
        rest = [rest, 0]
    with pytest.raises(PickleError, match="deeper"):
        read(pickle.dumps([part, rest], 2))


def _mutations(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        at = draw.randrange(len(changed) + 1)
        match draw.randrange(5):
            case 0 if at < len(changed):
                changed[at] = draw.randrange(256)
            case 1 if at < len(changed):
                changed[at] ^= 1 << draw.randrange(8)
            case 2:
                changed[at:at] = draw.randbytes(draw.choice([1, 1, 4, 9]))
            case 3:
                del changed[at : at + draw.choice([1, 2, 8])]
            case _:
                other = draw.randrange(len(changed) + 1)
                changed[at:at] = changed[other : other + draw.randrange(12)]
    return bytes(changed)


def _plain_sample() -> object:
    return {
        "a": [1, 2.5, None, True, -(1 << 40), 1 << 90],
        "b": ({"k": b"bytes" * 30}, "ü"),
        3: [["x"] * 3] * 2,
    }


def _rich_sample() -> object:
    return [
        _plain_sample(),
        OrderedDict(a=1),
        {1, 2},
        frozenset("abc"),
        bytearray(b"xyz"),
        3j,
        np.arange(4),
        datetime(2024, 1, 2, tzinfo=UTC),
        PurePosixPath("a/b"),
        range(3),
        _WithKeywords(),
    ]


@pytest.mark.timeout(120)
def test_mutated_pickles_are_read_or_refused() -> None:
    draw = random.Random(20240229)
    samples = [pickle.dumps(_rich_sample(), protocol) for protocol in PROTOCOLS]
    samples.append(archive_pickle({"w": torch.ones(3), "f8": torch.zeros(2, dtype=torch.float8_e5m2)}))
    refused = 0
    for turn in range(6000):
        mutated = _mutations(samples[turn % len(samples)], draw)
        found = scan(mutated)
        try:
            for node in walk(read(mutated)):
                repr(node) if isinstance(node, Reduce) else is_tensor(node)
        except PickleError:
            refused += 1
        else:
            assert found.error is None
    assert 1000 < refused < 6000


class _NoGlobals(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> object:
        raise pickle.UnpicklingError


@pytest.mark.timeout(120)
def test_what_python_reads_is_read_alike() -> None:
    """Where Python finds a value in a mutated pickle without globals, so does the reader, or it refuses."""
    draw = random.Random(7)
    samples = [pickle.dumps(_plain_sample(), protocol) for protocol in (2, 3, 4, 5)]
    compared = 0
    for turn in range(6000):
        mutated = _mutations(samples[turn % len(samples)], draw)
        try:
            expected = _NoGlobals(io.BytesIO(mutated)).load()
        except Exception:  # noqa: S112 - malformed input surfaces as almost any type
            continue
        try:
            value = read(mutated)
        except PickleError:
            continue
        assert alike(value, expected) or expected != expected
        compared += 1
    assert compared > 300


# torch


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.arange(6.0).reshape(2, 3),
    "scalar": lambda: torch.tensor(3),
    "empty": lambda: torch.zeros(0, 3, dtype=torch.bfloat16),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "view": lambda: torch.arange(10)[3:7:2],
    "float8": lambda: torch.zeros(4, dtype=torch.float8_e4m3fn)[1:],
    "uint16": lambda: torch.zeros(4, dtype=torch.uint16),
    "grad": lambda: torch.zeros(2, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.zeros(2)),
    "frozen": lambda: torch.nn.Parameter(torch.zeros(2), requires_grad=False),
    "conj": lambda: torch.zeros(2, dtype=torch.complex64).conj(),
    "neg": lambda: torch.zeros(2, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_are_recognised(kind: str) -> None:
    tensor = TENSORS[kind]()
    node = read(archive_pickle(tensor))
    assert is_tensor(node)
    found = tensor_of(node)
    assert found.dtype == str(tensor.dtype).removeprefix("torch.")
    assert found.shape == tuple(tensor.shape)
    assert found.strides == tensor.stride()
    assert found.offset == tensor.storage_offset()
    assert found.requires_grad == tensor.requires_grad
    assert (found.conj, found.neg) == (tensor.is_conj(), tensor.is_neg())
    assert found.contiguous == tensor.is_contiguous()
    assert found.storage.nbytes == tensor.untyped_storage().nbytes()
    assert found.extent * tensor.element_size() <= found.storage.nbytes
    assert (found.storage.key, found.storage.location) == ("0", "cpu")
    assert bool(found.wrapping) == isinstance(tensor, torch.nn.Parameter)


def test_a_tensor_with_attributes_is_seen_through() -> None:
    tensor = torch.zeros(2)
    tensor.tag = "x"
    found = tensor_of(read(archive_pickle(tensor)))
    assert found.wrapping == ("torch.Tensor",)
    assert found.shape == (2,)


def test_extent_ends_with_the_last_element() -> None:
    storage = StorageNode("0", "float32", "cpu", 100)
    assert TensorNode(storage, "float32", 5, (2, 3), (10, 2)).extent == 5 + 10 + 4 + 1
    assert TensorNode(storage, "float32", 5, (0, 3), (3, 1)).extent == 5


_STORAGE = PersistentRef(("storage", Global("torch", "FloatStorage"), "0", "cpu", 4))
_REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
MALFORMED: dict[str, Value] = {
    "negative size": Reduce(_REBUILD, (_STORAGE, 0, (-1,), (1,), False, None)),
    "negative offset": Reduce(_REBUILD, (_STORAGE, -1, (1,), (1,), False, None)),
    "ranks differ": Reduce(_REBUILD, (_STORAGE, 0, (1, 1), (1,), False, None)),
    "sizes are text": Reduce(_REBUILD, (_STORAGE, 0, "12", (1,), False, None)),
    "no storage": Reduce(_REBUILD, (None, 0, (1,), (1,), False, None)),
    "too few arguments": Reduce(_REBUILD, (_STORAGE,)),
    "storage of no known type": Reduce(
        _REBUILD,
        (PersistentRef(("storage", Global("os", "FloatStorage"), "0", "cpu", 4)), 0, (), (), False, None),
    ),
    "negative storage": Reduce(
        _REBUILD,
        (PersistentRef(("storage", Global("torch", "FloatStorage"), "0", "cpu", -4)), 0, (), (), False, None),
    ),
    "dtype of no known name": Reduce(
        Global("torch._utils", "_rebuild_tensor_v3"),
        (_STORAGE, 0, (), (), False, None, Global("torch", "load")),
    ),
    "not a tensor": Reduce(Global("builtins", "print"), ()),
    "plain value": 3,
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_tensors_are_refused(name: str) -> None:
    with pytest.raises(PickleError):
        tensor_of(MALFORMED[name])
