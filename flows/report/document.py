"""What all pages have in common: one HTML document that needs nothing else.

Style, script and data stand in it, and its content security policy lets nothing be loaded and nothing run
but that one script and that one style, by their hashes. jinja2 escapes every value; values from a bucket were
made inert before they came here.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from flows.text import human_bytes, human_seconds, name, plural, stretches
from tasks.manifest import tool_versions

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

Tone = Literal["good", "bad", "warn", "calm"]
Fact = tuple[str, str, str]
"""Name, value, and what more there is to say."""

_SCRIPTS = ("dom", "data", "tree", "view", "map", "main")
_MARKS: dict[Tone, str] = {
    "good": "M3 8.5l3.5 3.5L13 4.5",
    "bad": "M4 4l8 8M12 4l-8 8",
    "warn": "M8 3v6M8 12.6v.4",
    "calm": "M3.5 8h9",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer at the top of a page, in a word and a sentence."""

    tone: Tone
    word: str
    sentence: str

    @property
    def mark(self) -> str:
        """SVG path of the sign that goes with the tone, which is more than a colour."""
        return _MARKS[self.tone]


def document(template: str, *, title: str, made: str, data: Any = None, **values: Any) -> str:
    """Render a template around which everything else stands."""
    style, script = _style(), _script()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(script)}",
            f"style-src {_hash(style)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    from markupsafe import Markup

    return (
        _environment()
        .get_template(f"report/{template}")
        .render(
            title=title,
            made=made,
            policy=policy,
            style=Markup(style),
            script=Markup(script),
            # Base64 and numbers alone: nothing in it can end the element.
            data=Markup(json.dumps(data, separators=(",", ":"))) if data is not None else None,
            tool=tool_versions().get("ckpt-lifecycle", ""),
            **values,
        )
    )


def minute(when: str | None) -> str:
    """``2026-01-31 12:00 UTC`` for a time in ISO 8601."""
    return "" if when is None else f"{when[:16].replace('T', ' ')} UTC"


def apart(text: str) -> Markup:
    """``text`` escaped, in which what is read from right to left does not reorder what stands around it."""
    from markupsafe import Markup, escape

    pieces = (
        Markup("<bdi>{}</bdi>").format(it) if leftward else escape(it) for it, leftward in stretches(text)
    )
    return Markup("").join(pieces)


def _largest(rows: Sequence[Any]) -> int:
    return max((row.bytes for row in rows), default=0) or 1


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("flows.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["apart"] = apart
    environment.globals |= {
        "bytes": human_bytes,
        "seconds": human_seconds,
        "text": name,
        "minute": minute,
        "largest": _largest,
        "plural": plural,
    }
    return environment


@cache
def _style() -> str:
    return _resource("report.css")


@cache
def _script() -> str:
    parts = "\n".join(_resource(f"js/{part}.js") for part in _SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}\n}})();\n'


def _resource(path: str) -> str:
    return (files("flows.report") / "templates" / "report" / path).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
