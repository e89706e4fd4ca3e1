"""The command that makes a checkpoint of a file."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp.errors import AlreadyExistsError, UsageError
from flows.cli.command import command
from flows.cli.failures import FINE
from flows.cli.options import CheckpointUrl
from flows.cli.output import Output


@command("import")
def import_file(
    out: Output,
    file: Annotated[str, typer.Argument(metavar="FILE.pt", help="A local file that torch.save wrote.")],
    url: CheckpointUrl,
    ranks: Annotated[
        int, typer.Option("--ranks", metavar="N", min=1, max=1024, help="Shard as N ranks would save.")
    ] = 1,
    whole: Annotated[
        list[str] | None,
        typer.Option(
            "--whole", metavar="GLOB", help="Do not shard these tensors, such as buffers; may be repeated."
        ),
    ] = None,
    allow_pickle: Annotated[
        bool,
        typer.Option("--allow-pickle", help="Keep objects that torch.load refuses by default."),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a checkpoint that is there already.")
    ] = False,
) -> int:
    """Make a checkpoint of a torch.save file, as if N ranks had saved it.

    Tensors are cut along their first dimension, as FSDP2 cuts parameters. The file is streamed and nothing
    in it is run. The checkpoint appears only when it is whole.

    \b
    Example:
      ckpt import model.pt gs://bucket/run/step_0 --ranks 8
    """
    from dcp.save import import_torch_save
    from flows.cli.import_views import show_import

    try:
        with out.progress("import") as progress:
            report = import_torch_save(
                file,
                url,
                ranks,
                whole=whole or (),
                allow_pickle=allow_pickle,
                overwrite=overwrite,
                progress=progress,
            )
    except AlreadyExistsError as error:
        raise UsageError(
            f"{url} holds a committed checkpoint; name another place, or replace it with --overwrite"
        ) from error
    out.report(report, lambda: show_import(out, report))
    return FINE
