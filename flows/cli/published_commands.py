"""Commands about published steps: publishing by hand, moving an alias, checking what is published."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcp.errors import UsageError
from flows.cli.command import command
from flows.cli.failures import FAULTY, FINE
from flows.cli.options import SETTINGS_FILE, Config
from flows.cli.output import Output

if TYPE_CHECKING:
    from tasks.aliases import AliasRecord
    from tasks.publish import PublishReport


@command("publish")
def publish(
    out: Output,
    export: Annotated[
        str,
        typer.Argument(
            metavar="EXPORT", help="What ckpt export wrote; with --alias and no URL: a published directory."
        ),
    ],
    url: Annotated[
        str | None,
        typer.Argument(metavar="URL", help="The step it was exported from, of a run in the settings."),
    ] = None,
    alias: Annotated[
        str | None, typer.Option("--alias", metavar="NAME", help="Lead this alias to the published step.")
    ] = None,
    config: Config = SETTINGS_FILE,
) -> int:
    """Publish an export with its manifest, by hand.

    The step must validate, the files must be whole, and tensors under the step's names must be the step's.
    The files are copied below the run's publish root, hashed on the way, and the manifest comes last;
    `latest` moves forward. Which tensors are the step's under another name, cast, or none of it (and so on
    your word) is said and stands in the manifest; objects are on your word. With --alias and no URL nothing
    is copied: the alias is led to what is published already, also back to an older step.

    \b
    Examples:
      ckpt publish model.pt gs://bucket/run/step_12000 --alias best
      ckpt publish --alias latest gs://bucket/published/run/step_11000/1a2b3c4d
    """
    from flows.cli.published_views import show_alias, show_publication

    if url is None:
        if alias is None:
            raise UsageError("name the step that was exported, or an alias to lead to it: --alias NAME")
        record = _lead_alias(export, alias)
        out.report(record, lambda: show_alias(out, record))
        return FINE
    report = _publish(out, export, url, config)
    if alias is not None:
        _lead_alias(report.url, alias)
    out.report(report, lambda: show_publication(out, report, alias))
    return FINE


def _publish(out: Output, export: str, url: str, config: Path) -> PublishReport:
    from dcp.storage import join_url
    from flows.settings import load_settings
    from tasks.discover import compile_pattern, step_number
    from tasks.publish_export import publish_export

    settings = load_settings(config)
    run, step = settings.run_of(url)
    number = step_number(step, [compile_pattern(pattern) for pattern in run.step_pattern])
    if number is None:
        raise UsageError(f"{step!r} is no step of run {run.name!r}: it matches none of its step patterns")
    with out.progress("publish") as progress:
        return publish_export(
            export,
            join_url(run.source, step),
            run.publish,
            run=run.name,
            number=number,
            grace_seconds=run.grace_period,
            newer_seconds=run.newer_tolerance,
            copied=run.copied,
            progress=progress,
            options=run.options,
            publish_options=run.publish_options,
        )


def _lead_alias(published: str, alias: str) -> AliasRecord:
    """Lead ``alias`` to the published directory ``<root>/<run>/<step>/<fingerprint8>``."""
    from dcp.storage import normalise_url
    from dcp.storage.urls import split_url
    from tasks.aliases import set_alias

    run_url, step_and_fingerprint = normalise_url(published).removesuffix("/manifest.json"), []
    for _ in range(2):
        run_url, part = split_url(run_url)
        step_and_fingerprint.append(part)
    fingerprint, step = step_and_fingerprint
    root, run = split_url(run_url)
    return set_alias(root, run, step, fingerprint, alias=alias)


@command("verify")
def verify(
    out: Output,
    url: Annotated[
        str, typer.Argument(metavar="PUBLISHED_URL", help="A published directory, or its manifest.json.")
    ],
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Compare every tensor too with what was read from the checkpoint, and objects."
        ),
    ] = False,
) -> int:
    """Hash a published step again, against its manifest.

    Exit code 1 where a file is missing, changed or not in the manifest, where the manifest itself was changed
    or contradicts its place, or where there is none. With --deep also where a tensor in the finished files is
    not the one that the checkpoint held or is not listed, or an object is not the one that was published.
    Manifests of version 1 verify; what they cannot prove is said.

    \b
    Examples:
      ckpt verify gs://bucket/published/run/step_12000/1a2b3c4d
      ckpt verify gs://bucket/published/run/step_12000/1a2b3c4d --deep
    """
    from flows.cli.published_views import show_verification
    from tasks.verify import verify as verify_published

    with out.progress("verify") as progress:
        report = verify_published(url, deep=deep, progress=progress)
    errors = [] if report.ok else [f"{report.url}: {report.message}"]
    out.report(report, lambda: show_verification(out, report), errors=errors)
    return FINE if report.ok else FAULTY
