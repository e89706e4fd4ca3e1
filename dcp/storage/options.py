"""Options that are meant for a filesystem, told from misspelt arguments of whoever passes them on.

fsspec's filesystems pass over what they do not know, and local paths take nothing at all: without a check
``BucketWriter(url, overwite=True)`` would be taken and forgotten.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping

from dcp.errors import UsageError
from dcp.storage.urls import split_protocol

_NEAR = 0.8
"""How alike two names are, from 0 to 1, of which one is taken for a slip."""


def require_options(url: str, options: Mapping[str, object], called: Callable[..., object]) -> None:
    """Check options that ``called`` took and did not know.

    Raises:
        UsageError: one is nearly an argument of ``called``, or the location is a local path, which has none.
    """
    own = [
        name
        for name, parameter in inspect.signature(called).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    for name in options:
        meant = difflib.get_close_matches(name, own, 1, _NEAR)
        if meant:
            raise UsageError(f"there is no option {name!r}; it seems that {meant[0]!r} is meant")
        if split_protocol(url)[0] == "file":
            raise UsageError(
                f"there is no option {name!r}, and {url} is a local path, whose filesystem has none either; "
                f"what there is: {', '.join(own)}"
            )
