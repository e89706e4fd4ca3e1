"""Selecting and renaming: mistakes are told before anything is read, hostile indices cost nothing."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.errors import MetadataError, UsageError
from dcp.exporting import renaming
from dcp.exporting.renaming import parse_rename, renamed
from dcp.exporting.selection import DEEPEST, Selection, dotted, repath, select
from dcp.index import CheckpointIndex, ObjectEntry, PathPart


def index_of(paths: dict[str, tuple[PathPart, ...]]) -> CheckpointIndex:
    return CheckpointIndex({key: ObjectEntry(key, None) for key in paths}, paths)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("model", "has no '=>'"),
        ("=>x", "matches everywhere"),
        ("(=>x", "regular expression"),
        (r"a=>\9", "invalid group reference 9"),
        (r"(a)=>\2", "invalid group reference 2"),
        (r"(?P<x>a)=>\g<y>", "unknown group name"),
        (r"a=>\q", "bad escape"),
        (r"(?x) a # comment=>\1", "invalid group reference"),
        ("a{99999999999}=>x", "repetition number is too large"),
        ("(?a)(?u)x=>y", "flags are incompatible"),
        ("(" * 3000 + ")" * 3000 + "=>x", "recursion"),
    ],
)
def test_rules_are_checked_when_they_are_given(rule: str, text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        parse_rename(rule)


@pytest.mark.parametrize(
    ("rule", "name", "expected"),
    [
        (r"^module\.=>", "module.w", "w"),
        ("^=>model.", "w", "model.w"),
        (r"(?i)^MODEL=>net", "model.w", "net.w"),
        (r"(?x) ^model # the whole=>net", "model.w", "net.w"),
        (r"layers\.(\d+)=>blocks.\1", "layers.12.w", "blocks.12.w"),
        (r"(?P<n>\d+)\.(.*)=>\2.\g<n>", "12.w", "w.12"),
        (r"a=>b=>c", "a", "b=>c"),
        (r"(\w+\.)+weight=>one", "a.b.weight", "one"),
    ],
)
def test_rules_rename_as_re_does(rule: str, name: str, expected: str) -> None:
    assert renamed([name], [parse_rename(rule)]) == [expected]


def test_names_that_are_not_unicode_pass() -> None:
    assert renamed(["a.\ud800.b.c"], [(r"([^.]+)\.([^.]+)$", r"\2.\1")]) == ["a.\ud800.c.b"]


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (r"^(\w+)+$", "a" * 60 + "!"),
        (".*x", "a" * (1 << 21)),
        ("(?:a|a)*b", "a" * 60),
        ("(?:a|a){40}b", "a" * 60),
        ("a?" * 40 + "a" * 40 + "b", "a" * 60),
    ],
)
def test_rules_that_would_take_for_ever_are_ended(
    pattern: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renaming, "SECONDS", 0.3)
    with pytest.raises(UsageError, match=r"takes longer than 0\.3 s"):
        renamed([name], [(pattern, "x")])


PARTS = st.sampled_from(["", "a", "b", "a.b", ".", 0, 1, "0"])


@given(st.lists(PARTS, min_size=1, max_size=4), st.lists(st.sampled_from(["", "a", "b", "0"]), min_size=1))
def test_a_renamed_path_spells_its_name(path: list[PathPart], name: list[str]) -> None:
    assert dotted(repath(tuple(path), ".".join(name))) == ".".join(name)
    assert dotted(repath(tuple(path), dotted(path))) == dotted(path)


def test_a_dot_that_a_prefix_leaves_stays() -> None:
    index = index_of({"model.w": ("model", "w")})
    [item] = select(index, Selection(strip_prefix="model"))
    assert (item.key, item.path) == (".w", ("", "w"))


def test_a_collision_names_both() -> None:
    index = index_of({"a.b.c": ("a", "b.c"), "q": ("q",)})
    with pytest.raises(UsageError, match=r"'a\.b\.c' and 'q' would both be called 'a\.b\.c'"):
        select(index, Selection(rename=(("^q$", "a.b.c"),)))


def test_a_name_inside_anothers_value_is_wrong_usage() -> None:
    index = index_of({"a": ("a",), "c.b": ("c", "b"), "d": ("d",)})
    with pytest.raises(UsageError, match=r"'c\.b' would be called 'a\.b', inside 'a'"):
        select(index, Selection(rename=((r"^c\.", "a."),)))


def test_lists_of_a_hostile_index_are_bounded() -> None:
    paths: dict[str, tuple[PathPart, ...]] = {f"l{n}.1000000": (f"l{n}", 1_000_000) for n in range(100)}
    with pytest.raises(MetadataError, match="100000100 items in all hold 100 values"):
        select(index_of(paths), Selection())
    with pytest.raises(MetadataError, match="list position"):
        select(index_of({"l.9": ("l", 1 << 40)}), Selection())


def test_two_keys_recorded_at_one_place_are_damage() -> None:
    index = index_of({"a": ("m", "w"), "b": ("m", "w")})
    with pytest.raises(MetadataError, match=r"'a' and 'b' are both recorded at 'm\.w'") as raised:
        select(index, Selection())
    assert raised.value.exit_code == 1
    assert len(select(index, Selection(include=("b",)))) == 1


def test_nesting_that_nothing_loads_again_is_refused() -> None:
    path: tuple[PathPart, ...] = ("a",) * (DEEPEST + 1)
    with pytest.raises(MetadataError, match="401 levels deep"):
        select(index_of({"a" * 401: path}), Selection())
    assert select(index_of({"a" * 400: path[1:]}), Selection())
