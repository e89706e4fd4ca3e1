"""Names from a bucket are inert; bytes and times read well."""

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.findings import Finding, finding
from flows.grouping import grouped, shared_prefix
from flows.text import anchored, human_bytes, human_seconds, inert, name, plural, problem_name, stretches
from tasks.alert import TITLES

ANY_TEXT = st.text(st.characters(codec=None))


@given(ANY_TEXT)
def test_inert_text_is_printable_whatever_goes_in(text: str) -> None:
    assert inert(text).isprintable()


@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E)))
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert inert(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31m", "\\x1b[31m"),
        ("a\nb\rc\td", "a\\nb\\rc\\td"),
        ("\u202e", "\\u202e"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
        ("中é😀", "中é😀"),
    ],
)
def test_escapes_say_what_was_there(text: str, shown: str) -> None:
    assert inert(text) == shown


@given(ANY_TEXT)
def test_stretches_are_the_whole_text(text: str) -> None:
    assert "".join(piece for piece, _ in stretches(text)) == text


@given(st.text(st.sampled_from("ab12. :[]אבגשلا\u0301é中")))
def test_every_letter_from_right_to_left_is_within_a_stretch_and_no_other_letter_is(text: str) -> None:
    for piece, leftward in stretches(text):
        directions = {unicodedata.bidirectional(char) for char in piece}
        assert bool(directions & {"R", "AL"}) == leftward
        assert not (leftward and "L" in directions)


def test_what_stands_beside_letters_from_right_to_left_stays() -> None:
    assert anchored("a.שלם, גבר.b: 12 chunks") == "a.\u200eשלם, גבר\u200e.b: 12 chunks"
    assert anchored("model.weight: 12") == "model.weight: 12"
    assert anchored("é中: 12") == "é中: 12"


def test_long_names_lose_their_middle() -> None:
    shown = name("a" * 5000 + "z")
    assert len(shown) < 250
    assert shown.startswith("aaa")
    assert shown.endswith("z")
    assert "…" in shown


def test_an_empty_name_is_visible() -> None:
    assert name("") == "''"


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 1024, "1.5 MiB"),
        (1024**2 - 1, "1.0 MiB"),
        (5 * 1024**6, "5120.0 PiB"),
    ],
)
def test_bytes(count: int, shown: str) -> None:
    assert human_bytes(count) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.035, "35 ms"),
        (0.42, "0.4 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (60, "1 min"),
        (200, "3 min 20 s"),
        (3600 * 5 + 120, "5 h 2 min"),
        (86400 * 3, "3 d"),
        (float("inf"), "?"),
    ],
)
def test_seconds(seconds: float, shown: str) -> None:
    assert human_seconds(seconds) == shown


def test_plural() -> None:
    assert (plural(1, "key"), plural(0, "key"), plural(2000, "key")) == ("1 key", "0 keys", "2,000 keys")


@pytest.mark.parametrize(
    ("names", "shared"),
    [
        (["model.layers.0.w", "model.layers.1.w"], "model.layers.*"),
        (["model.layers.0.w", "model.layers.10.w", "model.layers.2.w"], "model.layers.*"),
        (["model.w", "optim.w"], None),
        (["model.w", "model.w"], "model.w"),
        (["model", "model.w"], "model.*"),
        (["model_a.w", "model_b.w"], None),
        ([], None),
    ],
)
def test_shared_prefix(names: list[str], shared: str | None) -> None:
    assert shared_prefix(names) == shared


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(".".join), min_size=1))
def test_a_shared_prefix_is_one(names: list[str]) -> None:
    shared = shared_prefix(names)
    if shared is None:
        assert len({each.split(".")[0] for each in names}) > 1
    else:
        stem = shared.removesuffix(".*")
        assert all(each == stem or each.startswith(f"{stem}.") for each in names)


def _gaps(count: int) -> list[Finding]:
    return [finding("tiling.gap", "a hole", key=f"model.layers.{n}.w") for n in range(count)]


def test_groups_put_errors_first_and_count_what_they_hide() -> None:
    orphan = finding("files.orphan", "left over", file="x")
    groups = grouped([orphan, *_gaps(312)], shown=5)
    assert [(g.code, g.count, g.hidden, g.where) for g in groups] == [
        ("tiling.gap", 312, 307, "model.layers.*"),
        ("files.orphan", 1, 0, None),
    ]
    assert [found.key for found in groups[0].shown] == [f"model.layers.{n}.w" for n in range(5)]


def test_a_single_one_is_shown_rather_than_counted() -> None:
    assert grouped(_gaps(6), shown=5)[0].hidden == 0


def test_the_operators_guide_explains_names_that_differ_from_the_events() -> None:
    guide = (Path(__file__).parents[3] / "deployments" / "README.md").read_text()
    for problem in TITLES:
        shown = problem_name(problem)
        assert shown == problem or f"`{shown}`" in guide
