"""Commands that hold checkpoints against each other or against what code expects."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated

import typer

from dcp.errors import UsageError
from flows.cli.command import command
from flows.cli.failures import FAULTY, FINE
from flows.cli.output import Output


@command("contract")
def contract(
    out: Output,
    url: Annotated[
        str | None, typer.Argument(metavar="[URL]", help="A checkpoint that is known to load.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODULE:FACTORY",
            help="Take the keys from the model that this function builds instead of from a checkpoint.",
        ),
    ] = None,
) -> int:
    """Print the expected keys as a contract, from a checkpoint or from the model itself.

    A contract is JSON: every key with its kind, shape and type. FACTORY takes no arguments and returns a
    torch module, (module, optimizer), or the dict that is saved; it is called on the meta device, so no
    memory is taken for the model.

    \b
    Examples:
      ckpt contract ./step_100 > contract.json
      ckpt contract --model train.model:build > contract.json
      ckpt validate ./step_200 --contract contract.json
    """
    if (url is None) == (model is None):
        raise UsageError("give either a checkpoint's URL or --model MODULE:FACTORY")
    if model is not None:
        from dcp.model_contract import contract_from_model

        out.document(contract_from_model(model).model_dump())
        return FINE
    from dcp.checkpoint import survey
    from dcp.contract import contract_at

    assert url is not None
    out.document(contract_at(survey(url)).model_dump())
    return FINE


@command("diff")
def diff(
    out: Output,
    url: Annotated[str, typer.Argument(metavar="URL_A", help="A checkpoint.")],
    other: Annotated[str, typer.Argument(metavar="URL_B", help="The checkpoint to compare it with.")],
    values: Annotated[
        bool, typer.Option("--values", help="Compare every element too, whatever the chunking.")
    ] = False,
) -> int:
    """Compare two checkpoints: keys, shapes, types and chunking, and on demand all values.

    Exit code 1 where they differ; another chunking alone is no difference. Both may be in any storage.

    \b
    Example:
      ckpt diff gs://bucket/run/step_11000 gs://bucket/run/step_12000 --values
    """
    from dcp.comparison import diff as compare
    from flows.cli.comparison_views import show_diff

    with out.progress("diff") if values else nullcontext() as progress:
        report = compare(url, other, values=values, progress=progress)
    out.report(report, lambda: show_diff(out, report), errors=report.findings)
    return FINE if report.same else FAULTY
