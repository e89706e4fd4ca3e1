"""Rename rules and patterns: whole components, every place, nothing in silence."""

from typing import Any

import pytest

from dcp.errors import UsageError
from dcp.load.patterns import Pattern
from dcp.load.planners import StrictLoadPlanner
from dcp.load.rename import pairs_of, rename


def named(keys: list[str], rules: dict[str, str]) -> list[str]:
    return list(rename(keys, pairs_of(rules)).sources)


def test_rules_replace_whole_components_wherever_they_stand() -> None:
    keys = ["net.w", "subnet.w", "optim.state.net.w.step", "nets"]
    assert named(keys, {"net": "model"}) == ["model.w", "subnet.w", "optim.state.model.w.step", "nets"]
    assert named(["a.module.b.module.w"], {"module": ""}) == ["a.b.w"]
    assert named(["model.layers.0.w", "model.x.layers"], {"model.layers": "dec.blocks"}) == [
        "dec.blocks.0.w",
        "model.x.layers",
    ]
    assert named(["a.w"], {"a": "b", "b": "c"}) == ["c.w"]


def test_a_collision_names_both_sources() -> None:
    [found] = rename(["a.w", "b.w", "c.w"], [("a", "b")]).collisions
    assert (found.code, found.severity, found.key) == ("keys.renamed", "error", "b.w")
    assert found.detail["sources"] == ["a.w", "b.w"]
    assert "a.w and b.w" in found.message


def test_rules_that_meet_nothing_are_told() -> None:
    assert rename(["a.w"], [("a", "a"), ("x", "y")]).idle == ("'x' -> 'y'",)


def test_a_rule_without_an_old_name_makes_no_sense() -> None:
    with pytest.raises(UsageError, match="old component"):
        pairs_of({"": "x"})


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"net": r"\9"}, "knows no groups"),
        ({"net": r"a.\g<1>"}, "knows no groups"),
        ({"net.": "model."}, "whole components, without a dot at either end, e.g. 'net' -> 'model'"),
        ({"net": ".model"}, "whole components"),
        ({"a..b": "c"}, "whole components"),
        ([("net",)], "is no pair of names"),
        (["ab"], "is no pair of names"),
        ([("a", 1)], "is no pair of names"),
    ],
)
def test_a_rule_that_is_none_is_refused_when_it_is_made(rules: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        StrictLoadPlanner(rename=rules)


def test_stars_are_remembered() -> None:
    assert Pattern("*.qkv.*").match("a.0.qkv.weight") == ("a.0", "weight")
    assert Pattern("*.q.*").expand(("a.0", "weight")) == "a.0.q.weight"
    assert Pattern("a.b").match("axb") is None
    assert Pattern("h?").match("h1") == ("1",)
    with pytest.raises(UsageError, match="1 stars where its partner has 2"):
        Pattern("*.q").expand(("a", "b"))
