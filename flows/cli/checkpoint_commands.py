"""Commands about one checkpoint: what it holds, whether it is whole, whether it loads, how to convert it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated, Any, Literal

import typer

from flows.cli.command import command
from flows.cli.failures import FAULTY, FINE
from flows.cli.options import (
    Allow,
    CheckpointUrl,
    Copied,
    MemoryBudget,
    complete_layout,
    parse_size,
    parse_span,
)
from flows.cli.output import Output

DEFAULT_LAYOUTS = ("fsdp=2", "fsdp=3")


@command("inspect")
def inspect(
    out: Output,
    url: CheckpointUrl,
    keys: Annotated[
        str | None, typer.Option("--keys", metavar="GLOB", help="Show only keys that match, e.g. 'model.*'.")
    ] = None,
) -> int:
    """Show the keys, shapes, chunks and files of a checkpoint.

    Reads only the index, and judges nothing: for that there is ckpt validate.

    \b
    Examples:
      ckpt inspect gs://bucket/run/step_12000
      ckpt inspect ./step_100 --keys 'optim.*' --json
    """
    from dcp.inspection import inspect as inspect_checkpoint
    from flows.cli.views import show_inspection

    report = inspect_checkpoint(url, keys)
    out.report(report, lambda: show_inspection(out, report))
    return FINE


@command("validate")
def validate(
    out: Output,
    url: CheckpointUrl,
    contract: Annotated[
        str | None,
        typer.Option("--contract", metavar="FILE", help="Expected keys, as ckpt contract writes them."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="URL", help="A good checkpoint whose keys are the expected ones."),
    ] = None,
    scrub: Annotated[
        bool, typer.Option("--scrub", help="Read every byte and hold it against every checksum.")
    ] = False,
    copied: Copied = False,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore",
            metavar="GLOB",
            help="Keys whose departure from the expectation does not count; may be repeated. "
            "Default: '*_extra_state*' and '*dp_rank_*'.",
        ),
    ] = None,
    allow: Allow = None,
    grace_period: Annotated[
        float,
        typer.Option(
            "--grace-period",
            metavar="DURATION",
            parser=parse_span,
            help="Without .metadata it is being written as long as something changed within this time, and "
            "incomplete afterwards.",
        ),
    ] = "30m",  # type: ignore[assignment]  # typer parses the default too
) -> int:
    """Find out whether a checkpoint can be resumed.

    Without --scrub the index and a listing are checked, which takes seconds at any size; with it every byte.
    If it cannot be resumed, every damage is named with its place. Exit code 0: committed and without an error
    finding (warnings allowed). 1: anything else, also a step that is still being written, because nothing
    can be resumed from it yet. 3: storage failed, which says nothing of the checkpoint.

    \b
    Examples:
      ckpt validate gs://bucket/run/step_12000 --against gs://bucket/run/step_11000
      ckpt validate ./step_100 --scrub --json
    """
    from dcp.checks.keys import IGNORED
    from dcp.validation import validate as validate_checkpoint
    from flows.cli.views import show_validation

    with out.progress("scrub") if scrub else nullcontext() as progress:
        report = validate_checkpoint(
            url,
            contract=contract,
            against=against,
            scrub=scrub,
            copied=copied,
            ignore=tuple(ignore) if ignore else IGNORED,
            allow=tuple(allow or ()),
            progress=progress,
            grace_seconds=grace_period,
        )
    out.report(report, lambda: show_validation(out, report), errors=report.findings)
    return FINE if report.ok else FAULTY


@command("test-load")
def load_as_others(
    out: Output,
    url: CheckpointUrl,
    layout: Annotated[
        list[str] | None,
        typer.Option(
            "--layout",
            metavar="LAYOUT",
            help="Ranks to load as, e.g. fsdp=8 or fsdp=4,tp=2; may be repeated. Default: fsdp=2 and fsdp=3.",
            autocompletion=complete_layout,
        ),
    ] = None,
    engine: Annotated[
        Literal["simulated", "gloo"],
        typer.Option("--engine", help="All ranks in this process, or a real process a rank."),
    ] = "simulated",
    tp_rules: Annotated[
        str | None,
        typer.Option(
            "--tp-rules",
            metavar="FILE",
            help='TOML that says what tp shards: lines such as \'"*.w1.weight*" = "column"\', or "row", '
            '"replicate" or a dimension. Default: dimension 1.',
        ),
    ] = None,
    allow: Allow = None,
    memory_budget: MemoryBudget = "1GiB",  # type: ignore[assignment]  # typer parses the default too
    reader: Annotated[
        Literal["bucket", "torch"],
        typer.Option(
            "--reader", help="What ranks of --engine gloo read with: ours, or torch's (local paths)."
        ),
    ] = "bucket",
    copied: Copied = False,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Load nothing: say what 1 to 1024 ranks, or the layouts, would read."),
    ] = False,
) -> int:
    """Load a checkpoint as other numbers of ranks would.

    Every rank goes through torch's own load planning, simulated in this process or, with --engine gloo, in a
    process of its own, which takes memory for the whole model. Nothing may remain of what stood in the
    targets before, and every tensor must equal what the index's chunks hold.

    A step of several checkpoints is loaded part by part. With --plan only the index is read, and what loads
    would read is worked out from it.

    \b
    Examples:
      ckpt test-load gs://bucket/run/step_12000 --layout fsdp=8 --layout fsdp=4,tp=2
      ckpt test-load ./step_100 --layout fsdp=2,tp=4 --tp-rules tp.toml
      ckpt test-load gs://bucket/run/step_12000 --plan
    """
    if plan:
        from dcp.load.forecast import forecast
        from dcp.tp_rules import TpRules
        from flows.cli.forecast_views import show_forecast

        rules = None if tp_rules is None else TpRules.read(tp_rules)
        planned = forecast(url, layouts=layout, tp_rules=rules)
        out.report(planned, lambda: show_forecast(out, planned))
        return FINE
    from dcp.load import test_load
    from flows.cli.views import findings_of, show_test_load

    with out.progress("test-load") as progress:
        report = test_load(
            url,
            layouts=tuple(layout or DEFAULT_LAYOUTS),
            engine=engine,
            reader=reader,
            memory_budget=memory_budget,
            tp_rules=tp_rules,
            allow=tuple(allow or ()),
            copied=copied,
            progress=progress,
        )
    out.report(report, lambda: show_test_load(out, report), errors=findings_of(report))
    return FINE if report.ok else FAULTY


@command("export")
def export(
    out: Output,
    url: CheckpointUrl,
    dest: Annotated[
        str,
        typer.Argument(
            metavar="DEST",
            help="What to write, a path or URL: a file, or for safetensors NAME.safetensors or a directory.",
        ),
    ],
    format: Annotated[
        Literal["torch", "safetensors"],
        typer.Option("--format", help="One torch.save file, or safetensors, which hold tensors only."),
    ] = "torch",
    include: Annotated[
        list[str] | None, typer.Option("--include", metavar="GLOB", help="Take only keys that match.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", metavar="GLOB", help="Leave keys that match out.")
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--rename",
            metavar="'REGEX=>TEXT'",
            help="Rename keys, every match as re.sub does: anchor whole names, '^.*$'. May be repeated.",
        ),
    ] = None,
    strip_prefix: Annotated[
        str | None, typer.Option("--strip-prefix", metavar="P", help="Take P off the front of every key.")
    ] = None,
    dtype: Annotated[
        Literal["float16", "bfloat16", "float32", "float64"] | None,
        typer.Option(
            "--dtype",
            help="Cast floating tensors to this type, as torch rounds; numbers too large for it are told.",
        ),
    ] = None,
    tie: Annotated[
        bool,
        typer.Option(
            "--tie",
            help="For tied weights: let tensors of one type and shape with the same bytes in the checkpoint "
            "share one storage; of safetensors keep only the first. Those of one repeated value, as all "
            "zeros, and those that only --dtype makes equal stay apart.",
        ),
    ] = False,
    max_shard_size: Annotated[
        int,
        typer.Option(
            "--max-shard-size",
            metavar="SIZE",
            parser=parse_size,
            help="Bytes of tensors in one safetensors file.",
        ),
    ] = "5GB",  # type: ignore[assignment]  # typer parses the default too
    memory_budget: MemoryBudget = "512MiB",  # type: ignore[assignment]  # typer parses the default too
    allow_pickle: Annotated[
        bool,
        typer.Option("--allow-pickle", help="Keep objects that torch.load refuses by default."),
    ] = False,
    sha256: Annotated[
        bool,
        typer.Option("--sha256", help="Tell the SHA-256 of each file as well; slower than writing it."),
    ] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Say what it would take, and write nothing.")] = False,
) -> int:
    """Convert a checkpoint to one torch.save file, or to safetensors.

    It is streamed in bounded memory, so the model may be larger than the machine. DEST appears only when
    it is whole; in a directory of safetensors the index appears last. A checkpoint with gaps or damage in
    what is exported is refused, and so is what memory or disk here cannot hold: exit code 3, with --plan too.

    \b
    Examples:
      ckpt export gs://bucket/run/step_12000 model.pt --include 'model.*' --strip-prefix model.
      ckpt export ./step_100 ./model --format safetensors --include 'model.*' --strip-prefix model.
      ckpt export ./step_100 out.pt --plan
    """
    from dcp.errors import ResourceError, UsageError
    from dcp.exporting import export as export_checkpoint
    from dcp.exporting import plan_export
    from flows.cli.export_views import show_export, show_plan

    if dest.startswith("memory://"):
        raise UsageError(f"{dest} would be gone with this command; use a path, gs:// or s3://")
    request: dict[str, Any] = {
        "format": format,
        "include": tuple(include or ()),
        "exclude": tuple(exclude or ()),
        "rename": tuple(rename or ()),
        "strip_prefix": strip_prefix,
        "dtype": dtype,
        "tie": tie,
        "max_shard_size": max_shard_size,
        "memory_budget": memory_budget,
        "allow_pickle": allow_pickle,
    }
    if plan:
        planned = plan_export(url, dest, **request, detail=out.json)
        out.report(planned, lambda: show_plan(out, planned), errors=planned.refusals)
        return ResourceError.exit_code if planned.refusals else FINE
    with out.progress("export") as progress:
        report = export_checkpoint(url, dest, progress=progress, sha256=sha256, **request)
    out.report(report, lambda: show_export(out, report), errors=report.findings)
    return FINE if report.ok else FAULTY
