import collections
import datetime
import decimal
import io
import os
import pickle
import pickletools
import re
import warnings
from argparse import Namespace
from functools import reduce
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
import pytest
import torch
from torch._weights_only_unpickler import _get_allowed_globals, load

from dcp.errors import UsageError
from dcp.pickles.nodes import Global
from dcp.pickles.reader import read
from dcp.pickles.scan import (
    Allowance,
    Judgement,
    Verdict,
    beyond_weights_only,
    globals_of,
    judge,
    scan,
    verdict_on,
)
from dcp.pickles.tables import PERMITTED, REACHING, REACHING_MODULES, WEIGHTS_ONLY, WEIGHTS_ONLY_OPCODES
from dcp.pickles.writer import write
from tests.support.golden import ROOT
from tests.support.states import archive_pickle

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def _judge(data: bytes, *allow: str) -> Judgement:
    return judge(scan(data), Allowance(allow))


def test_the_table_is_torchs_own() -> None:
    assert set(_get_allowed_globals()) == WEIGHTS_ONLY


def test_the_opcodes_are_those_that_torch_knows() -> None:
    for name, opcode in ((each.name, each.code.encode("latin1")) for each in pickletools.opcodes):
        said = ""
        with warnings.catch_warnings(action="ignore"):
            try:
                load(io.BytesIO(opcode + b"N."))
            except Exception as error:
                said = str(error)
        assert (f"Unsupported operand {opcode[0]}" in said) == (name not in WEIGHTS_ONLY_OPCODES), name


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_is_said_of_weights_only_is_true(protocol: int) -> None:
    values = [1, -1, 1 << 40, 1 << 2039, 1 << 2040, 1.5, "é", b"x", bytearray(b"x"), [None, True], {1}, ()]
    values += [frozenset({1}), b"", {"a": (1, 2, 3, 4)}, collections.OrderedDict(a=1), range(3)]
    for value in values:
        data = pickle.dumps(value, protocol)
        taken = True
        with warnings.catch_warnings(action="ignore"):
            try:
                load(io.BytesIO(data))
            except (pickle.UnpicklingError, ModuleNotFoundError):
                taken = False
        assert taken == (not beyond_weights_only(scan(data))), (value, beyond_weights_only(scan(data)))


def test_what_is_permitted_never_reaches_code() -> None:
    modules = {name.rpartition(".")[0] for name in PERMITTED}
    assert not PERMITTED & REACHING
    assert not modules & REACHING_MODULES


class Config:
    pass


HARMLESS = {
    "plain values": {"a": [1, "x", None], "b": (2.0, b"bytes", b"", bytearray(b"x"))},
    "sets": [{1}, frozenset({2}), 3j, range(4), slice(1, 2)],
    "collections": [
        collections.OrderedDict(a=1),
        collections.defaultdict(list, a=[1]),
        collections.Counter("aab"),
        collections.deque([1, 2], maxlen=3),
    ],
    "numpy": [np.arange(3), np.float64(2), np.zeros(2, np.int8), np.array(["x", None], dtype=object)],
    "dates": [
        datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC),
        datetime.date(2024, 1, 1),
        datetime.timedelta(3),
        datetime.time(4),
    ],
    "paths": [PurePosixPath("a"), PureWindowsPath("b"), Path("c")],
    "others": [decimal.Decimal("1.5"), Namespace(lr=0.1)],
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_objects_are_allowed(name: str, protocol: int) -> None:
    assert _judge(pickle.dumps(HARMLESS[name], protocol)) == Judgement(Verdict.ALLOWED)


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_numpys_dtype_classes_are_allowed(protocol: int) -> None:
    assert _judge(pickle.dumps([np.dtype("f4"), type(np.dtype("f4"))], protocol)).verdict is Verdict.ALLOWED


def test_what_torch_saves_is_allowed() -> None:
    state = {
        "parameter": torch.nn.Parameter(torch.zeros(2)),
        "float8": torch.zeros(2, dtype=torch.float8_e4m3fn),
        "size": torch.Size([1]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "sparse": torch.eye(2).to_sparse(),
        "module": torch.nn.Linear(2, 2).state_dict(),
        "extra state": io.BytesIO(b"in memory"),
    }
    assert _judge(archive_pickle(state)).verdict is Verdict.ALLOWED


def test_unknown_classes_are_listed() -> None:
    found = _judge(pickle.dumps([Config(), {1}]))
    assert found == Judgement(Verdict.UNKNOWN, unknown=(f"{__name__}.Config",))


class _Calls:
    """Pickles as a call of anything."""

    def __init__(self, func: object, *args: object) -> None:
        self.call = func, args

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call


ATTACKS: dict[str, tuple[object, str]] = {
    "os.system": (_Calls(os.system, "touch /canary"), f"{os.name}.system"),
    "eval": (_Calls(eval, "1"), "builtins.eval"),
    "exec": (_Calls(exec, "1"), "builtins.exec"),
    "getattr": (_Calls(getattr, "x", "upper"), "builtins.getattr"),
    "__import__": (_Calls(__import__, "this"), "builtins.__import__"),
    "open": (_Calls(open, "/canary", "w"), "io.open|_io.open|builtins.open"),
    "pickle.loads": (_Calls(pickle.loads, b"N."), "_?pickle.loads"),
    "_load_from_bytes": (_Calls(torch.storage._load_from_bytes, b""), "torch.storage._load_from_bytes"),
    "reduce": (_Calls(reduce, print, "x"), "_?functools.reduce"),
    "torch.load": (_Calls(torch.load, "x"), "torch.serialization.load"),
    "hub": (_Calls(torch.hub.load, "x"), "torch.hub.load"),
    "np.memmap": (_Calls(np.memmap, "/canary"), "numpy.memmap"),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_reach_code(name: str, protocol: int) -> None:
    attack, global_ = ATTACKS[name]
    found = _judge(pickle.dumps({"model": {"weight": attack}}, protocol))
    assert found.verdict is Verdict.REACHES_CODE
    assert len(found.reaching) == 1
    assert re.fullmatch(global_, found.reaching[0])


CRAFTED = {
    "unused": (b"\x80\x02cos\nsystem\n0N.", "os.system"),
    "called in Python 2's name": (b"c__builtin__\neval\n.", "builtins.eval"),
    "by a module renamed since": (b"ccommands\ngetoutput\n.", "subprocess.getoutput"),
    "old class instance": (b"(S'x'\nios\nsystem\n.", "os.system"),
    "names on the stack": (b"\x8c\x02os\x8c\x06system\x93.", "os.system"),
    "names from the memo": (b"\x8c\x06system\x940\x8c\x02os\x940h\x01h\x00\x93.", "os.system"),
    "module inside": (b"cimportlib.util\nfind_spec\n.", "importlib.util.find_spec"),
    "attribute walk": (b"\x8c\x0bcollections\x8c\x15abc.sys.modules.clear\x93.", None),
    "walk from a permitted module": (b"\x8c\x05torch\x8c\x0a_utils.sys\x93.", None),
    "walk from a permitted class": (b"\x8c\x08argparse\x8c\x12Namespace.__init__\x93.", None),
    "methods of permitted classes": (b"\x8c\x07pathlib\x8c\x0bPath.unlink\x93.", None),
    "special attributes anywhere": (b"\x8c\x05mymod\x8c\x0dC.__globals__\x93.", None),
    "through another's imports": (b"\x8c\x05mymod\x8c\x09os.system\x93.", None),
    "then cut off": (b"\x80\x02cos\nsystem\nX\xff\xff\xff\x7f", "os.system"),
    "then nonsense": (b"\x80\x02cos\nsystem\n\xff", "os.system"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_attacks_reach_code(name: str) -> None:
    data, global_ = CRAFTED[name]
    found = _judge(data)
    assert found.verdict is Verdict.REACHES_CODE
    assert global_ is None or found.reaching == (global_,)


def test_an_unreadable_pickle_is_not_allowed() -> None:
    found = _judge(b"\x80\x02}")
    assert found.verdict is Verdict.UNKNOWN
    assert found.error is not None
    assert _judge(b"\x80\x02\x82\x01.").verdict is Verdict.REACHES_CODE


def test_globals_come_once_in_order() -> None:
    data = pickle.dumps([collections.OrderedDict(), {1}, collections.OrderedDict()], 2)
    assert globals_of(data) == ["collections.OrderedDict", "builtins.set"]


def test_scan_ends_where_the_pickle_ends() -> None:
    first = pickle.dumps({"a": 1})
    assert scan(first + b"cos\nsystem\n.") == scan(first)
    assert scan(first + b"more").end == len(first)


def test_permitted_names_count_only_in_their_modules() -> None:
    allow = Allowance()
    assert verdict_on(Global("numpy.core.multiarray", "scalar"), allow) is Verdict.ALLOWED
    assert verdict_on(Global("numpy", "core.multiarray.scalar"), allow) is not Verdict.ALLOWED
    assert verdict_on(Global("evil.collections", "OrderedDict"), allow) is Verdict.UNKNOWN
    assert verdict_on(Global("collections.OrderedDict", "x"), allow) is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("module", "name", "verdict"),
    [
        ("pkg.config", "Train", Verdict.ALLOWED),
        ("pkg", "Top", Verdict.ALLOWED),
        ("pkgs", "Other", Verdict.UNKNOWN),
        ("pkg.config", "Train.Inner", Verdict.UNKNOWN),
        ("pkg", "os.system", Verdict.REACHES_CODE),
        ("one", "Name", Verdict.ALLOWED),
        ("one", "Other", Verdict.UNKNOWN),
        ("functools", "reduce", Verdict.ALLOWED),
        ("torch.hub", "load", Verdict.REACHES_CODE),
        ("os", "getcwd", Verdict.REACHES_CODE),
    ],
)
def test_a_users_list(module: str, name: str, verdict: Verdict) -> None:
    allow = Allowance(["pkg.*", "one.Name", "functools.reduce", "torch.*", "os.getcwd"])
    assert verdict_on(Global(module, name), allow) is verdict


@pytest.mark.parametrize("entry", ["", "*", "name", "pkg.*.name", "pkg.**", "pkg..name", "pkg.na-me", "pkg."])
def test_a_users_list_is_checked(entry: str) -> None:
    with pytest.raises(UsageError, match="full name"):
        Allowance([entry])


def _golden_pickles() -> dict[str, bytes]:
    """Every pickle in a torch archive inside the golden checkpoints' files, by file and place."""
    found = {}
    for path in sorted(ROOT.rglob("*")):
        data = path.read_bytes() if path.suffix in {".distcp", ".pt"} else b""
        for match in re.finditer(rb"/data\.pklFB(..)Z*\x80", data, re.DOTALL):
            start = match.start(1) + 2 + int.from_bytes(match[1], "little")
            found[f"{path.relative_to(ROOT)}:{start}"] = data[start:]
    return found


def test_the_goldens_pickles() -> None:
    reaching, unknown = set(), set()
    pickles = _golden_pickles()
    same = 0
    for data in pickles.values():
        found = scan(data)
        assert found.error is None
        judged = judge(found)
        reaching.update(judged.reaching)
        unknown.update(name.split(".")[0] for name in judged.unknown)
        same += write(read(data)) == data[: found.end]
    assert len(pickles) > 800
    assert reaching == set()
    assert unknown == {"__main__", "functools", "torch", "torchao"}
    # Written again they are the same bytes, but for one-character strings, which Python itself shares.
    assert same > 0.98 * len(pickles)
