"""A settings file that is wrong, told as one line: file, field, what is wrong, and what was perhaps meant."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from dcp.errors import SettingsError

_SHOWN = 80


def wrong_setting(
    file: str, error: ValidationError, model: type[BaseModel], *, env_prefix: str
) -> SettingsError:
    """The first thing wrong in ``error``, and how many more there are."""
    problems = error.errors(include_url=False)
    # An unknown name explains a missing one: report it first.
    problems.sort(key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    path = [part for part in first["loc"] if not (isinstance(part, str) and part.endswith("]"))]
    place = _place(file, path, env_prefix)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return SettingsError(f"{place}: {_message(first, path, model)}{more}")


def unreadable_toml(file: str, error: Exception) -> SettingsError:
    """The file is no TOML, or not text."""
    if isinstance(error, UnicodeDecodeError):
        return SettingsError(f"{file}: is not UTF-8 text (byte {error.start})")
    reason = " ".join(str(error).split()) or type(error).__name__
    cause = " ".join(str(error.__cause__).split()) if error.__cause__ else ""
    return SettingsError(f"{file}: {reason}{f': {cause}' if cause else ''}")


def _place(file: str, path: list[int | str], env_prefix: str) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    variable = f"{env_prefix}{path[0]}".upper() if path else ""
    if any(name.upper() == variable for name in os.environ):
        return f"environment variable {variable}: {text}"
    return f"{file}: {text}" if text else file


def _message(problem: Mapping[str, Any], path: list[int | str], model: type[BaseModel]) -> str:
    match problem["type"]:
        case "extra_forbidden":
            known = list(_model_at(model, path[:-1]).model_fields)
            near = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(sorted(known))}"
            return f"unknown setting; {hint}"
        case "missing":
            return "missing"
        case "tuple_type":
            return "should be a list"
        case "byte_size" | "byte_size_unit":
            text = 'should be a size such as "512MiB" or "5GB"'
        case "value_error":
            text = str(problem["ctx"]["error"])
        case "literal_error":
            text = f"should be {problem['ctx']['expected']}"
        case _:
            text = problem["msg"].replace("Input should", "should")
    given = problem.get("input")
    # Alert URLs and storage options hold secrets.
    secret = any(part in ("alerts", "options", "publish_options") for part in path)
    shown = f", not {given!r}" if isinstance(given, str | int | float | bool) and not secret else ""
    return f"{text}{shown}" if len(shown) <= _SHOWN else text


def _model_at(model: type[BaseModel], path: list[int | str]) -> type[BaseModel]:
    """The model of the section that ``path`` leads to."""
    for part in path:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        inner = [kind for kind in (annotation, *get_args(annotation)) if _is_model(kind)]
        model = inner[0]
    return model


def _is_model(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
