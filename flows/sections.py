"""What every table of `lifecycle.toml` is made of: its base class, and values that are written as text."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)", re.ASCII)


def parse_duration(value: object) -> float:
    """Seconds in ``"90s"``, ``"30m"``, ``"2h"``, ``"1d"`` or a bare number of seconds.

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return float(value)
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError('should be a duration such as "90s", "30m", "2h" or "1d"')
    return float(match[1]) * _UNITS[match[2] or "s"]


Seconds = Annotated[float, BeforeValidator(parse_duration)]


def listed(value: object) -> object:
    """A single string where a list of them is taken."""
    return [value] if isinstance(value, str) else value


class Section(BaseModel):
    """One table: what it does not know is refused, and nothing changes after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True)
