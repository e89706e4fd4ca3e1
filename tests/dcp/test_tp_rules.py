"""Tp rules are read in order, say what is wrong with them, and shard what they name."""

from pathlib import Path

import pytest

from dcp.errors import UsageError
from dcp.tp_rules import TpRules

TEXT = """
"*.w1.weight*" = "column"
"*.w2.*" = "row"
"*.experts.*" = 2
"""


def test_a_file_of_rules(tmp_path: Path) -> None:
    file = tmp_path / "tp.toml"
    file.write_text(TEXT)
    rules = TpRules.read(str(file))
    assert rules.dim("l.0.w1.weight", (8, 4)) == 0
    assert rules.dim("optim.state.l.0.w1.weight.exp_avg", (8, 4)) == 0
    assert rules.dim("optim.state.l.0.w1.weight.step", ()) is None
    assert rules.dim("l.0.w2.weight", (8, 4)) == 1
    assert rules.dim("l.0.w2.bias", (8,)) is None
    assert rules.dim("l.0.experts.up", (4, 8, 16)) == 2
    assert rules.dim("norm.weight", (8,)) is None
    assert rules.idle(["l.0.w1.weight", "norm.weight"]) == ["*.w2.*", "*.experts.*"]
    assert TpRules.of(rules.as_mapping()) == rules


def test_the_first_rule_that_matches_counts() -> None:
    rules = TpRules.of({"head.*": "replicate", "*": "column"})
    assert rules.dim("head.weight", (8, 4)) is None
    assert rules.dim("body.weight", (8, 4)) == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no rules"),
        ('"*.w" = "colum"', r"'colum' is no rule: give 'column', 'row', 'replicate' or the number"),
        ('"*.w" = -1', "-1 is no rule"),
        ('"*.w" = true', "True is no rule"),
        ('a.w = "row"', "in quotes"),
        ('"*.w" = ', "is no file of tp rules"),
        ('"a" = 0\n"a" = 1', "is no file of tp rules"),
    ],
)
def test_what_is_no_rule_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "tp.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=words) as caught:
        TpRules.read(str(file))
    assert str(file) in str(caught.value)


def test_a_dimension_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"the tp rule '\*' = 2 matches w, which has shape \[8, 4\]"):
        TpRules.of({"*": 2}).dim("w", (8, 4))
