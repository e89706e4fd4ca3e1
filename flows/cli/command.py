"""How a command is made: `@command` turns a function of an `Output` and options into a `ckpt` command.

The function prints through its first argument and returns the exit code. What all commands share stands
here once: ``--json``, ``--quiet``, ``--debug``, and what happens to every exception.
"""

from __future__ import annotations

import inspect
import logging
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer

from flows.cli.ending import EndedError, ended_in_order
from flows.cli.failures import INTERRUPTED, OUTPUT_CLOSED, SIGNALLED, failure_of
from flows.cli.output import Output, OutputClosedError
from flows.text import inert

Body = Callable[..., int]

app = typer.Typer(
    name="ckpt",
    help="Find out whether PyTorch Distributed Checkpoints can be resumed, and turn them into files that can "
    "be used.",
    epilog="Exit codes: 0 fine, 1 the checkpoint or artifact has an error finding, 2 wrong usage or "
    "settings, 3 the environment failed. Locations are local paths or fsspec URLs (gs://, s3://, memory://).",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if not asked:
        return
    from tasks.manifest import tool_versions

    sys.stdout.write(f"ckpt {tool_versions().get('ckpt-lifecycle', 'of an unknown version')}\n")
    raise typer.Exit


@app.callback()
def _root(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """What ``ckpt`` itself takes, before a command's name."""


_COMMON = {
    "json": Annotated[bool, typer.Option("--json", help="Print one JSON document, also on failure.")],
    "quiet": Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")],
    "debug": Annotated[bool, typer.Option("--debug", help="Show tracebacks and detailed logs on stderr.")],
}


def command(name: str) -> Callable[[Body], Body]:
    """Register a function as ``ckpt NAME``; its docstring is the help."""

    def register(body: Body) -> Body:
        signature = inspect.signature(body, eval_str=True)
        _, *own = signature.parameters.values()

        def run(*, json: bool, quiet: bool, debug: bool, **given: Any) -> int:
            return guarded(body, Output(json=json, quiet=quiet, debug=debug), given)

        common = [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
            for option, annotation in _COMMON.items()
        ]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + common
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(name, help=inspect.getdoc(body))(run)
        return body

    return register


def guarded(body: Body, out: Output, given: dict[str, Any]) -> int:
    """Call ``body(out, **given)``; the exit code, whatever happens in it."""
    _quieten(out.debug)
    try:
        with ended_in_order():
            code = body(out, **given)
            out.flush()
    except EndedError as ended:
        out.interrupted()
        return SIGNALLED + ended.number
    except KeyboardInterrupt:
        out.interrupted()
        return INTERRUPTED
    except OutputClosedError:
        abandon_stdout()
        return OUTPUT_CLOSED
    except SystemExit:
        raise
    # torch's CheckpointException is no Exception.
    except BaseException as error:
        if out.debug:
            traceback.print_exc()
        url = given.get("url")
        failure = failure_of(error, shlex.quote(url) if isinstance(url, str) else "URL")
        out.failure(failure)
        return failure.exit_code
    return code


def abandon_stdout() -> None:
    """Let nothing that is still buffered be written at exit, where it could only fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _quieten(debug: bool) -> None:
    """Logs go to stderr: this project's warnings, other packages' last words; all else with ``--debug``."""
    handler = StderrHandler()
    handler.setFormatter(_InertFormatter(tracebacks=debug))
    # What happened is in the report that is printed; some packages log it too, with levels of their own.
    handler.addFilter(lambda record: debug or _is_ours(record) or _is_last_word(record))
    logging.basicConfig(level=logging.INFO if debug else logging.ERROR, handlers=[handler])
    for name in _OURS:
        logging.getLogger(name).setLevel(logging.DEBUG if debug else logging.WARNING)
    if not debug and not sys.warnoptions:
        warnings.simplefilter("ignore")


_OURS = ("dcp", "tasks", "flows")


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] in _OURS


def _is_last_word(record: logging.LogRecord) -> bool:
    """Whether something ends for good that is not a flow: those fail with tracebacks in Prefect's log."""
    return record.levelno >= logging.CRITICAL and record.name.partition(".")[0] != "prefect"


class StderrHandler(logging.Handler):
    """Writes to whatever stderr is at the time.

    Where a root handler with a public name stands already, Prefect adds none of its own.
    """

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(self.format(record) + "\n")


class _InertFormatter(logging.Formatter):
    """A log line can hold a key name from a bucket."""

    def __init__(self, *, tracebacks: bool) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")
        self._tracebacks = tracebacks

    def format(self, record: logging.LogRecord) -> str:
        if self._tracebacks:
            return super().format(record)
        record.message = record.getMessage()
        return self.formatMessage(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return inert(super().formatMessage(record))
