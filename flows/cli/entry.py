"""The entry point of `ckpt`: parses the command line, runs the command, answers for wrong usage."""

from __future__ import annotations

import gc
import io
import sys
from collections.abc import Sequence

import typer

from flows.cli import commands  # noqa: F401 - registers them
from flows.cli.command import abandon_stdout, app
from flows.cli.failures import FINE, OUTPUT_CLOSED, usage_failure
from flows.cli.output import Output


def run(arguments: Sequence[str]) -> int:
    """Run ``ckpt`` with ``arguments`` (without the program's name) and return the exit code."""
    try:
        code = app(args=list(arguments), prog_name="ckpt", standalone_mode=False)
    except typer.TyperException as error:
        if not arguments:
            # `ckpt` alone: the message is the help text.
            sys.stderr.write(error.format_message() + "\n")
            return error.exit_code
        context = getattr(error, "ctx", None)
        failure = usage_failure(error.format_message(), context.command_path if context else "ckpt")
        Output(json="--json" in arguments).failure(failure)
        return failure.exit_code
    return code if isinstance(code, int) else FINE


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the terminal's encoding lacks must not end a report.
            stream.reconfigure(errors="backslashreplace")
    if "--debug" not in sys.argv:
        # What Ctrl-C left half made, as an event loop, has tracebacks of its own when it is thrown away.
        sys.unraisablehook = lambda _: None
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        abandon_stdout()
        code = OUTPUT_CLOSED
    # The interpreter's last collection would look through everything that torch made: half a second.
    gc.freeze()
    sys.exit(code)
