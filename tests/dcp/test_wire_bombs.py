"""Hostile `.metadata`: refused in bounded time and memory, with nothing but a `MetadataError`."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.golden import GOLDENS

_HEAD = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}("
_SIZE = b"ctorch\nSize\n"


def _meta(planner_data: bytes) -> bytes:
    """A complete index with something in `planner_data`."""
    return (
        _HEAD
        + b"\x8c\x13state_dict_metadata}\x8c\x0cstorage_data}\x8c\x0cplanner_data"
        + planner_data
        + b"ub."
    )


def _nested(levels: int) -> bytes:
    return b")" + b"\x85" * levels


def _doubled(levels: int) -> bytes:
    """A tuple of itself twice, over and over: 2 ** levels to hash."""
    return b")" + b"2\x86" * levels


BOMBS: dict[str, bytes] = {
    "long_binput": _meta(b"}r\xff\xff\xff\xff"),
    "memo index beyond": b"\x80\x04Nr\xff\xff\xff\xff0j\xfe\xff\xff\xff.",
    "put": _meta(b"}p" + b"9" * 3000 + b"\n"),
    "nested key": _meta(b"}" + _nested(1_000_000) + b"Ns"),
    "doubled key": _meta(b"}" + _doubled(64) + b"Ns"),
    "doubled member": _meta(b"}\x8f(" + _doubled(64) + b"\x90" + b"Ns"),
    "doubled member of a frozen set": _meta(b"}(" + _doubled(64) + b"\x91" + b"Ns"),
    "deep lists": _meta(b"]" * 1_000_000 + b"a" * 999_999),
    "deep tuples": _meta(b")" + b"\x85" * 1_000_000),
    "deep dicts": _meta(b"}" + b"N}" * 300_000 + b"s" * 300_000),
    "deep instances": _meta(
        b"ctorch.distributed.checkpoint.metadata\nStorageMeta\nq\x00)\x81"
        + b"h\x00)\x81" * 300_000
        + b"b" * 300_000
    ),
    "marks": _meta(b"(" * 3_000_000),
    "marks and tuples": _meta(b"(" * 1_000_000 + b"t" * 1_000_000),
    "memo flood": _meta(b"}" + b"\x94" * 1_000_000),
    "memo flood far apart": _meta(
        b"}" + b"".join(b"r" + (i * 4001).to_bytes(4, "little") for i in range(600_000))
    ),
    "recall flood": _meta(b"}\x94(" + b"h\x00" * 2_000_000 + b"l"),
    "doubling path": _meta(
        b"cpathlib\nPosixPath\nq\x00\x8c\x20"
        + b"a" * 32
        + b"\x85R"
        + b"".join(b"q\x010h\x00h\x01h\x01\x86R" for _ in range(64))
    ),
    "copied lists": _meta(b"](" + b"K\x01" * 200_000 + b"eq\x000" + (_SIZE + b"h\x00\x85R0") * 20_000 + b"N"),
    "shared state": _meta(
        b"}("
        + b"".join(b"\x8c\x07%07dN" % i for i in range(100_000))
        + b"uq\x000"
        + b"ctorch.distributed.checkpoint.metadata\nStorageMeta\n)\x81"
        + b"h\x00b" * 100_000
    ),
    "shared paths": (
        _HEAD
        + b"\x8c\x13state_dict_metadata}\x8c\x0cstorage_data}\x8c\x0cplanner_data}("
        + b"\x8c\x01a("
        + b"K\x01" * 100_000
        + b"tq\x00"
        + b"".join(b"\x8c\x07%07dh\x00" % i for i in range(100_000))
        + b"uub."
    ),
    "shared chunks": (
        _HEAD + b"\x8c\x0cstorage_data}\x8c\x13state_dict_metadata}("
        b"\x8c\x01actorch.distributed.checkpoint.metadata\nTensorStorageMetadata\nq\x00)\x81}("
        b"\x8c\x0apropertiesctorch.distributed.checkpoint.metadata\nTensorProperties\n)\x81"
        b"}\x8c\x05dtypectorch\nfloat32\nsbq\x01\x8c\x04size)\x8c\x06chunks]("
        + b"ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\n)\x81}(\x8c\x07offsets)"
        b"\x8c\x05sizes)ubq\x02"
        + b"h\x02" * 20_000
        + b"eq\x03ub"
        + b"".join(
            b"\x8c\x07%07dh\x00)\x81}(\x8c\x0apropertiesh\x01\x8c\x04size)\x8c\x06chunksh\x03ub" % i
            for i in range(10_000)
        )
        + b"uub."
    ),
    "colliding ints": _meta(
        b"}("
        + b"".join(
            b"\x8a\x0b" + ((2**61 - 1) * (i + 2**18)).to_bytes(11, "little") + b"N" for i in range(50_000)
        )
        + b"u"
    ),
    "huge ints": _meta(b"}" + b"\x8b\xff\xff\xff\x7f" + b"\x01" * 64),
    "digits": _meta(b"}L" + b"9" * 2_000_000 + b"L\nNs"),
    "unicode length": _meta(b"}\x8d" + b"\xff" * 7 + b"\x7f"),
    "bytes length": _meta(b"}\x8e" + b"\xff" * 7 + b"\x7f"),
    "bytearray length": _meta(b"}\x96" + b"\xff" * 7 + b"\x7f"),
    "frame length": b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f" + _meta(b"}")[2:],
    "binunicode length": _meta(b"}X\xff\xff\xff\xff"),
    "long4 negative": _meta(b"}\x8b\x00\x00\x00\x80"),
    "dimensions": _meta(b"}")[:-2] + b"(\x8c\x13state_dict_metadata}\x8c\x01a"
    b"ctorch.distributed.checkpoint.metadata\nTensorStorageMetadata\n)\x81}(\x8c\x04size("
    + b"J\xff\xff\xff\x7f" * 500_000
    + b"tubsub.",
}

HARMLESS = {
    "long_binput", "put", "deep lists", "deep tuples", "deep dicts", "memo flood", "memo flood far apart",
    "deep instances", "doubled key", "marks and tuples",
}  # fmt: skip
"""Bombs for the C unpickler only: here they cost what they weigh. They may be read or refused."""


def limited(code: str, *arguments: str, gigabytes: float = 1.5, seconds: float = 60) -> str:
    """Run Python in a process of its own that cannot get more than so much memory."""
    limit = int(gigabytes * (1 << 30))
    head = f"import resource, sys\nresource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))\n"
    run = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert run.returncode == 0, f"{run.returncode}: {run.stderr[-2000:]}"
    return run.stdout.strip()


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(BOMBS[name])
    code = """
        from dcp.errors import MetadataError
        from dcp.wire.parser import Parser
        from dcp.wire.reader import load
        data = open(sys.argv[1], "rb").read()
        for runs in (False, True):
            try:
                Parser(load(data, runs=runs), ".metadata").index()
            except MetadataError as error:
                print(error.code)
            else:
                print("read")
    """
    outcomes = set(limited(code, str(path)).split())
    if name in HARMLESS:
        assert outcomes <= {"read", "metadata.unreadable"}
    else:
        assert outcomes == {"metadata.unreadable"}


def test_random_damage_under_a_memory_limit() -> None:
    """6,000 damaged copies of real indices: read or a MetadataError, within 1 GB, and no crash."""
    seeds = [str(golden.directory / ".metadata") for golden in GOLDENS]
    code = """
        import os, random
        from dcp.errors import MetadataError
        from dcp.index import parse
        seeds = [open(p, "rb").read() for p in sys.argv[1:] if os.path.exists(p)]
        seeds.sort(key=len)
        seeds = seeds[:12]
        rng = random.Random(11)
        refused = 0
        for _ in range(6_000):
            data = bytearray(rng.choice(seeds))
            for _ in range(rng.randint(1, 4)):
                at = rng.randrange(len(data))
                match rng.randrange(5):
                    case 0: data[at] ^= 1 << rng.randrange(8)
                    case 1: del data[at : at + rng.randint(1, 40)]
                    case 2: data[at:at] = data[at : at + rng.randint(1, 40)]
                    case 3: data[at] = rng.randrange(256)
                    case 4: data[at : at + 4] = b"\\xff\\xff\\xff\\x7f"
                if len(data) < 2:
                    break
            try:
                parse(bytes(data))
            except MetadataError:
                refused += 1
        print(refused)
    """
    assert int(limited(code, *seeds, gigabytes=1, seconds=300)) > 1_500
