"""What a notice that arrives over HTTP says: which step of which run was committed.

Two kinds are understood: that of `dcp.notify_committed`, and the envelope in which Google Cloud Pub/Sub
pushes a notification of a bucket. Both come from the network, so both are taken for hostile: bounded,
checked field by field, and a step is only ever looked up in the settings, never taken from a notice as it is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from dcp.errors import UsageError
from dcp.index import METADATA
from dcp.storage import is_safe_name, normalise_url
from flows.settings import LifecycleSettings
from tasks.discover import compile_pattern, step_number
from tasks.text import plain

LIMIT = 64 << 10
"""Largest notice taken, in bytes. Pub/Sub's are about 2 kB."""

Text = Annotated[str, Field(max_length=2048)]


class _Committed(BaseModel):
    event: Literal["committed"]
    url: Text


class _Attributes(BaseModel):
    event_type: Text = Field(alias="eventType")
    bucket: Text = Field(alias="bucketId")
    name: Text = Field(alias="objectId")


class _Message(BaseModel):
    attributes: _Attributes


class _Push(BaseModel):
    message: _Message
    subscription: Text


class BadNoticeError(UsageError):
    """The notice is none of those that are understood."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a run in the settings."""

    run: str
    step: str


def step_of_notice(settings: LifecycleSettings, body: bytes) -> Step | None:
    """The step that a notice is about; None if it is about nothing that has to be done.

    Raises:
        BadNoticeError: it is no notice, or names a place that is no step of any run.
    """
    try:
        document = json.loads(body)
    # Deep nesting ends the decoder with a RecursionError.
    except (ValueError, RecursionError):
        raise BadNoticeError("the notice is no JSON") from None
    if not isinstance(document, dict):
        raise BadNoticeError("the notice is no JSON object")
    try:
        if "message" in document:
            return _pushed(settings, _Push.model_validate(document))
        committed = _Committed.model_validate(document)
    except ValidationError as error:
        raise BadNoticeError(f"the notice is not understood: {_first(error)}") from None
    found = _step_at(settings, committed.url)
    if found is None:
        said = plain(committed.url, 200)
        raise BadNoticeError(f"the notice names no step of any run in the settings: {said}")
    return found


def _pushed(settings: LifecycleSettings, push: _Push) -> Step | None:
    """Only the creation of an index commits a step; what else happens in the bucket is nobody's news."""
    said = push.message.attributes
    folder, _, name = said.name.rpartition("/")
    if said.event_type != "OBJECT_FINALIZE" or not folder or not name.endswith(METADATA):
        return None
    return _step_at(settings, f"gs://{said.bucket}/{folder}")


def _step_at(settings: LifecycleSettings, url: str) -> Step | None:
    """The step at ``url``, or the one of which ``url`` is a part."""
    try:
        place = normalise_url(url)
    except UsageError:
        return None
    for _ in range(2):
        try:
            run, step = settings.run_of(place)
        except UsageError:
            place = place.rpartition("/")[0]
            continue
        patterns = [compile_pattern(pattern) for pattern in run.step_pattern]
        if not is_safe_name(step) or step_number(step, patterns) is None:
            return None
        return Step(run.name, step)
    return None


def _first(error: ValidationError) -> str:
    problem: Any = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in problem["loc"])
    return f"{field}: {problem['msg']}"
