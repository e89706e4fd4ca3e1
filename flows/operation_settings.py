"""Settings of a run for those on call: what is worth an alert, what follows a publication, what is kept.

`OperationSettings` is the part of a run's table that holds them; `RetireSettings` and `AfterPublishSettings`
are tables of their own, `[runs.retire]` and `[runs.after_publish]`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field, model_validator

from flows.sections import Seconds, Section, listed


class AfterPublishSettings(Section):
    """What is started once for every step that was published: a command, or a deployment of Prefect."""

    command: Annotated[tuple[str, ...], BeforeValidator(listed)] = ()
    """Program and arguments, started without a shell. The environment says what was published:
    `CKPT_MANIFEST`, `CKPT_PUBLISHED`, `CKPT_RUN`, `CKPT_STEP`, `CKPT_NUMBER`, `CKPT_FINGERPRINT`."""
    deployment: str = ""
    """``flow/deployment`` that gets `parameters` and ``manifest``, the manifest's URL."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    timeout: Seconds = 600.0
    """Seconds after which the command is killed."""
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3

    @model_validator(mode="after")
    def _one(self) -> AfterPublishSettings:
        if bool(self.command) == bool(self.deployment):
            raise ValueError("should have either command or deployment")
        if self.deployment and self.deployment.count("/") != 1:
            raise ValueError("deployment should be written as flow/deployment")
        if self.parameters and not self.deployment:
            raise ValueError("parameters are for a deployment; a command takes arguments")
        if "manifest" in self.parameters:
            raise ValueError("the parameter manifest is given by the lifecycle")
        return self


class RetireSettings(Section):
    """Which steps are kept, and what becomes of the others. A step is kept if any one setting keeps it."""

    latest: Annotated[int, Field(ge=1)] | None = None
    """Keep so many steps with the highest numbers."""
    every: Annotated[int, Field(ge=1)] | None = None
    """Keep steps whose number is a multiple of it."""
    best: Annotated[tuple[str, ...], BeforeValidator(listed)] = ()
    """Names of steps to keep. Whatever an alias leads to is kept without being named."""
    newer_than: Seconds | None = None
    """Keep steps that were committed so recently."""
    trash: Seconds = 604_800.0
    """Seconds between the decision and the deletion; until then a step stays as it is."""
    delete: bool = False
    """Whether anything is deleted at all."""
    options: dict[str, Any] | None = Field(default=None, repr=False)
    """fsspec options for the source with credentials that may delete; those of the run are for reading."""

    @model_validator(mode="after")
    def _keeps(self) -> RetireSettings:
        if self.latest is None and self.every is None and self.newer_than is None:
            raise ValueError("should say what to keep: latest, every or newer_than, and best beside them")
        return self


class OperationSettings(Section):
    """The part of a run's table that says how it is operated."""

    stall_factor: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 3.0
    """Alert when no step was committed for so many times the usual interval; 0 for never."""
    stall_minimum: Seconds = 900.0
    """Seconds without a commit that are no stall, however often the run saves."""
    junk_size: ByteSize = ByteSize(100 << 30)
    """Alert when uncommitted steps hold so many bytes; 0 for never."""
    junk_age: Seconds = 86_400.0
    """Seconds without a change after which an uncommitted step counts as junk."""
    late_steps: Literal["process", "ignore"] = "process"
    """What becomes of a step that was committed after one with a higher number was published."""
    report: bool = True
    """Whether a page to look at, `report.html`, stands beside every published step."""
    after_publish: AfterPublishSettings | None = None
    retire: RetireSettings | None = None
