"""Flows that people start from Prefect's UI: `validate-checkpoint` and `export-checkpoint`.

Their parameters are typed and described for the form there. What came out is in the state's message and, in
full, in an artifact of the run. A checkpoint that was found bad is an answer, so the run completes, as
``Bad``; a run fails where the environment did.
"""

from __future__ import annotations

import time
from typing import Any, Literal

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed
from pydantic import BaseModel, ByteSize, ConfigDict, Field

from dcp.errors import CheckpointError, NotLoadableError, UsageError
from dcp.exporting.report import CastDtype
from dcp.findings import Finding, errors_of
from flows.artifact_pages import code, plain_name
from flows.settings import DEFAULT_FILE, load_settings
from flows.text import plural
from tasks.export import ExportRequest, export_step
from tasks.prefect_tasks import call_as_task
from tasks.validate import validate_step

_SHOWN = 200
_MESSAGE = 500
"""Characters of a finding's message."""


class ExportOptions(BaseModel):
    """What is exported, and how."""

    model_config = ConfigDict(extra="forbid")

    format: Literal["torch", "safetensors"] = Field(
        "torch", description="torch: one file for torch.load. safetensors: tensors only, for Hugging Face."
    )
    include: list[str] = Field([], description="Keep only keys that match one of these globs: model.*")
    exclude: list[str] = Field([], description="Leave out keys that match one of these globs: optim.*")
    rename: list[str] = Field([], description="Rules REGEX=>TEXT on keys: ^module[.]=>")
    strip_prefix: str | None = Field(None, description="Prefix to take off every key: model.")
    dtype: CastDtype | None = Field(None, description="Cast floating tensors to this type.")
    max_shard_size: str = Field("5GB", description="Largest safetensors file.")
    memory_budget: str = Field("512MiB", description="Memory that the export itself may use.")
    allow_pickle: bool = Field(
        False, description="Keep objects of classes that torch.load would refuse. Never executed here."
    )

    def request(self, name: str) -> ExportRequest:
        """The same as the stage takes it. Raises `UsageError` for a size that is none."""
        values: dict[str, Any] = dict(self)
        for field in ("max_shard_size", "memory_budget"):
            try:
                values[field] = int(_Size(size=values[field]).size)
            except ValueError:
                raise UsageError(f"{field}: {values[field]!r} is no size such as 512MiB or 5GB") from None
        for field in ("include", "exclude", "rename"):
            values[field] = tuple(values[field])
        return ExportRequest(name=name, **values)


class _Size(BaseModel):
    size: ByteSize


@flow(name="validate-checkpoint", persist_result=False)
def validate_checkpoint(
    url: str, scrub: bool = False, copied: bool = False, config: str = DEFAULT_FILE
) -> State[Any]:
    """Can this checkpoint be resumed? If not, where is the damage?

    Args:
        url: the checkpoint, e.g. gs://bucket/run/step_12000; that of a run in the settings is read with the
            run's options.
        scrub: read every byte and check every checksum there is.
        copied: it is a copy, so the times of its files mean nothing.
        config: path of the settings file on the worker.
    """
    run = load_settings(config).run_at(url)
    report = call_as_task(
        validate_step,
        url,
        scrub=scrub or bool(run and run.scrub),
        copied=copied or bool(run and run.copied),
        allow=run.allow_classes if run else (),
        parts=run.parts if run else (),
        grace_seconds=run.grace_period if run else 1800.0,
        newer_seconds=run.newer_tolerance if run else 300.0,
        now=time.time(),
        options=run.options if run else {},
    )
    return _answer("validation", url, report.state, report.ok, report.findings)


@flow(name="export-checkpoint", persist_result=False)
def export_checkpoint(
    url: str,
    folder: str,
    name: str = "checkpoint.pt",
    options: ExportOptions = ExportOptions(),
    config: str = DEFAULT_FILE,
) -> State[Any]:
    """Convert a checkpoint to one torch.save file or to safetensors, in bounded memory.

    Args:
        url: the checkpoint, e.g. gs://bucket/run/step_12000; that of a run in the settings is read with the
            run's options.
        folder: where to write; a path means the worker's own disk.
        name: the file, or the directory of several safetensors files.
        options: what is exported, and how.
        config: path of the settings file on the worker.
    """
    run = load_settings(config).run_at(url)
    try:
        report = call_as_task(
            export_step,
            url,
            folder,
            parts=run.parts if run else (),
            requests=[options.request(name)],
            options=run.options if run else {},
            publish_options=run.publish_options if run else {},
        )
    except CheckpointError as error:
        findings = error.findings if isinstance(error, NotLoadableError) else (error.as_finding(),)
        return _answer("export", url, "not exported", False, findings)
    files = [file for artifact in report.artifacts for file in artifact.files]
    warnings = [found for artifact in report.artifacts for found in artifact.findings]
    lines = [f"{file.name}: {file.size:,} bytes, SHA-256 {file.sha256}" for file in files]
    return _answer("export", url, f"exported to {folder}", True, warnings, lines)


def _answer(
    kind: str, url: str, verdict: str, ok: bool, findings: Any, lines: list[str] | None = None
) -> State[Any]:
    shown: list[Finding] = list(findings)
    errors = len(list(errors_of(shown)))
    body = [f"# {kind} of {code(url)}", "", f"**{verdict}**", ""]
    body += [f"- {code(line)}" for line in lines or ()]
    body += [
        f"- {found.severity} `{found.code}`: {code(found.message, _MESSAGE)}" for found in shown[:_SHOWN]
    ]
    if len(shown) > _SHOWN:
        body.append(f"- and {len(shown) - _SHOWN} more")
    create_markdown_artifact(
        "\n".join(body), key=f"checkpoint-{kind}", description=f"{kind} of {plain_name(url)}"
    )
    message = f"{verdict}: {plural(errors, 'error')}, {plural(len(shown) - errors, 'other finding')}"
    return Completed(name="Completed" if ok else "Bad", message=message)
