"""How tensor parallelism shards each tensor, by rules on keys: column parallel, row parallel, or whole.

A rule file is TOML, one rule a line: a glob on keys and what is done to the tensors it matches. The first
rule that matches a key is the one that counts; what none matches is whole on every rank of the tp axis, as a
module is that ``parallelize_module`` was not told of.

    "*.w1.weight*" = "column"      # nn.Linear by its outputs: dimension 0 of the weight, and of the bias
    "*.w2.*"       = "row"         # nn.Linear by its inputs: dimension 1 of the weight, the bias whole
    "*.experts.*"  = 2             # this dimension
    "*.norm.*"     = "replicate"   # whole

A star at the end lets the optimizer's state follow its parameter (``….w1.weight.exp_avg``). Pure but for
`TpRules.read`; no torch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from dcp.boxes import Shape
from dcp.errors import NotFoundError, UsageError
from dcp.storage import open_parent

Style = Literal["column", "row", "replicate"] | int
"""What a rule does: by an ``nn.Linear``'s outputs, by its inputs, nothing, or along a dimension."""

LIMIT = 1 << 20
"""Largest rule file read, in bytes."""
_STYLES = ("column", "row", "replicate")


@dataclass(frozen=True, slots=True)
class TpRules:
    """Rules in order: (glob, style)."""

    rules: tuple[tuple[str, Style], ...]

    @classmethod
    def of(cls, rules: Mapping[str, object], source: str = "tp rules") -> TpRules:
        """Rules from a mapping, whose order counts.

        Args:
            rules: style by glob.
            source: what a message calls them.

        Raises:
            UsageError: there are none, or one is not understood; it is named.
        """
        if not rules:
            raise UsageError(f'{source}: no rules; give lines such as "*.w1.weight*" = "column"')
        return cls(tuple((glob, _style(glob, value, source)) for glob, value in rules.items()))

    @classmethod
    def given(cls, rules: TpRules | Mapping[str, object] | str | None) -> TpRules | None:
        """Rules as callers give them: made already, as a mapping, or as the place of a file.

        Raises:
            UsageError, StorageError: as `of` and `read`.
        """
        if rules is None or isinstance(rules, TpRules):
            return rules
        return cls.read(rules) if isinstance(rules, str) else cls.of(rules)

    @classmethod
    def read(cls, url: str) -> TpRules:
        """Rules from a TOML file, given as a path or an fsspec URL.

        Raises:
            UsageError: there is no such file, it is no TOML, or holds what is no rule.
            StorageError: it cannot be read.
        """
        try:
            store, name = open_parent(url)
            parsed = tomllib.loads(store.read(name, LIMIT).decode())
        except NotFoundError:
            raise UsageError(f"there is no file of tp rules at {url}") from None
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"{url}: is no file of tp rules: {error}") from None
        return cls.of(parsed, url)

    def dim(self, key: str, shape: Shape) -> int | None:
        """The dimension of a tensor that the tp axis shards; None if it is whole on each rank.

        A scalar is always whole, and so is what has one dimension where a row rule matches.

        Raises:
            UsageError: a rule names a dimension that the tensor does not have.
        """
        rule = next(((glob, style) for glob, style in self.rules if fnmatchcase(key, glob)), None)
        if rule is None or rule[1] == "replicate" or not shape:
            return None
        glob, style = rule
        if style == "column":
            return 0
        if style == "row":
            return 1 if len(shape) > 1 else None
        assert isinstance(style, int)
        if style >= len(shape):
            raise UsageError(
                f"the tp rule {glob!r} = {style} matches {key}, which has shape {list(shape)} and no "
                f"dimension {style}; narrow the pattern or put a rule for this key before it"
            )
        return style

    def idle(self, keys: Iterable[str]) -> list[str]:
        """Globs that match none of the keys."""
        names = list(keys)
        return [glob for glob, _ in self.rules if not any(fnmatchcase(name, glob) for name in names)]

    def as_mapping(self) -> dict[str, Style]:
        """What `of` makes them from."""
        return dict(self.rules)


def _style(glob: str, value: object, source: str) -> Style:
    if value == "column":
        return "column"
    if value == "row":
        return "row"
    if value == "replicate":
        return "replicate"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    hint = ""
    if isinstance(value, dict):
        hint = "; write the pattern in quotes, since dots outside of them make TOML tables"
    raise UsageError(
        f"{source}: {glob!r} = {value!r} is no rule: give {', '.join(map(repr, _STYLES))} or the number of a "
        f"dimension{hint}"
    )
