"""`Output`: the one way anything is printed by `ckpt`.

Three modes. *Human*: tables and lines on stdout, notes and progress on stderr. *JSON*: exactly one document
on stdout, the report's own or an error's, and nothing else there. *Quiet*: nothing but errors. Whatever
comes from a bucket is made inert on the way, so hostile names cannot reach the terminal as anything but text.
rich is loaded when the first table, style or progress bar is needed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal, TextIO

from dcp.errors import EnvironmentFault
from flows.cli.failures import Failure
from flows.grouping import grouped
from flows.text import anchored, inert

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

    from dcp.findings import Finding

Cell = str | tuple[str, str]
"""Text, or text and the name of a style."""

_STYLES = {
    "error": "bold red",
    "warning": "yellow",
    "info": "cyan",
    "good": "green",
    "bad": "bold red",
    "dim": "dim",
    "title": "bold",
}
ROOM = 100
"""Columns of a terminal from which on wide tables have all their columns."""
_PIPED_WIDTH = 100_000
_SHORT = 20
"""Columns of a cell that is not broken as long as others can be."""


class OutputClosedError(Exception):
    """Whoever read stdout has gone away."""


class Output:
    """Prints for one command. ``json`` wins over ``quiet`` for what stdout gets."""

    def __init__(self, *, json: bool = False, quiet: bool = False, debug: bool = False) -> None:
        self.json = json
        self.quiet = quiet
        self.debug = debug
        self._documents = 0
        self._page: list[str] | None = None

    # --- results, on stdout

    def report(
        self, report: BaseModel, view: Callable[[], None], errors: Iterable[Finding | str] = ()
    ) -> None:
        """A command's result: the report itself as JSON, or whatever ``view`` prints.

        Args:
            report: the whole result.
            view: prints it for a person.
            errors: what quiet mode says of it, on stderr; findings that are no errors are left out.
        """
        if self.json:
            self.document(report.model_dump())
        elif not self.quiet:
            view()
        else:
            told = list(errors)
            found = [one for one in told if not isinstance(one, str) and one.severity == "error"]
            for text, style in _folded(found):
                self._complain(text, style)
            for one in told:
                if isinstance(one, str):
                    self._complain(f"error: {one}", "error")

    def document(self, value: object, *, one_line: bool = False) -> None:
        """One JSON document on stdout, in ASCII, in every mode."""
        self._documents += 1
        from pydantic_core import to_jsonable_python

        text = json.dumps(
            _finite(value), indent=None if one_line else 2, allow_nan=False, default=to_jsonable_python
        )
        self._write(sys.stdout, text + "\n")

    def line(self, text: str = "", style: str | None = None) -> None:
        """One line on stdout."""
        if not self._speaks:
            return
        if style is None:
            self._print(_shown(text, sys.stdout) + "\n")
        else:
            self._print(self._styled(self._stdout, _shown(text, sys.stdout), style))

    def facts(self, facts: Iterable[tuple[str, Cell]]) -> None:
        """Name and value pairs, one a line, aligned."""
        rows = list(facts)
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            text, style = value if isinstance(value, tuple) else (value, None)
            self.line(f"{name:<{width}}  {text}", style)

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[Cell]], *, right: Sequence[str] = ()
    ) -> None:
        """A table without borders; columns named in ``right`` are aligned to the right."""
        if not self._speaks:
            return
        from rich.table import Table
        from rich.text import Text

        lines = [
            [
                Text(_shown(cell[0], sys.stdout), _STYLES.get(cell[1], ""))
                if isinstance(cell, tuple)
                else Text(_shown(cell, sys.stdout))
                for cell in row
            ]
            for row in rows
        ]
        widths = [
            max([len(column), *(line[number].cell_len for line in lines)])
            for number, column in enumerate(columns)
        ]
        # Where room is short, long names fold and numbers stay in one piece.
        least = sum(width if width <= _SHORT else _SHORT for width in widths)
        tight = least + 2 * (len(columns) - 1) > self.width
        table = Table(box=None, pad_edge=False, collapse_padding=tight, header_style=_STYLES["title"])
        for column, width in zip(columns, widths, strict=True):
            side: Literal["left", "right"] = "right" if column in right else "left"
            table.add_column(column, justify=side, overflow="fold", no_wrap=width <= _SHORT)
        for line in lines:
            table.add_row(*line)
        with self._stdout.capture() as capture:
            # What does not fit even so is left to the terminal to wrap: nothing is cut off.
            self._stdout.print(table, width=max(self.width, least + len(columns) - 1), crop=False)
        self._print("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))

    def findings(self, findings: Iterable[Finding]) -> None:
        """Findings in groups, errors first."""
        for text, style in _folded(findings):
            self.line(text, style)

    # --- beside the result, on stderr

    def note(self, text: str) -> None:
        """What is going on, for a person; not in quiet mode."""
        if not self.quiet:
            self._complain(text)

    def warn(self, text: str) -> None:
        """Something to know that is no error."""
        if not self.quiet:
            self._complain(f"warning: {text}", "warning")

    def interrupted(self) -> None:
        """The user pressed Ctrl-C."""
        self._complain("interrupted")

    def failure(self, failure: Failure, *, one_line: bool = False) -> None:
        """Why the command ends here: a line and the next step, or the error document.

        With ``one_line`` it goes on, and the document is one of a stream.
        """
        if self.json and (one_line or not self._documents):
            try:
                self.document(failure.document(), one_line=one_line)
            except (OutputClosedError, EnvironmentFault):
                self._complain(f"error: {failure.message}", "error")
            return
        code = f" ({failure.findings[0].code})" if len(failure.findings) == 1 else ""
        self._complain(f"error: {failure.message}{code}", "error")
        if len(failure.findings) > 1:
            for text, style in _folded(failure.findings):
                self._complain(f"  {text}", style)
        if failure.advice:
            self._complain(f"  {failure.advice}")

    @contextmanager
    def progress(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Yield ``report(done, total)``, both in bytes: a bar with rate and ETA on a terminal's stderr."""
        with self.stages(what) as report:
            yield partial(report, what)

    @contextmanager
    def stages(self, what: str) -> Iterator[Callable[[str, int, int], None]]:
        """The same for work of several parts: ``report(part, done, total)``."""
        if self.quiet or not sys.stderr.isatty():
            yield _no_progress
            return
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._stderr, transient=True) as bar:
            task = bar.add_task(_shown(what, sys.stderr), total=None)
            shown = what

            def report(what: str, done: int, total: int) -> None:
                nonlocal shown
                if what != shown:
                    # Rate and time left begin anew.
                    bar.reset(task, total=total, description=_shown(what, sys.stderr))
                    shown = what
                bar.update(task, completed=done, total=total)

            yield report

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Say that something is being done: a spinner on a terminal's stderr, else nothing."""
        if self.quiet or not sys.stderr.isatty():
            yield
            return
        from rich.text import Text

        with self._stderr.status(Text(_shown(what, sys.stderr))):
            yield

    @contextmanager
    def live(self) -> Iterator[Callable[[Callable[[], None]], None]]:
        """Yield ``show(view)``: what ``view`` prints takes the place of what was shown before."""
        from rich.live import Live
        from rich.text import Text

        with Live(console=self._stdout, auto_refresh=False, vertical_overflow="crop") as live:

            def show(view: Callable[[], None]) -> None:
                self._page = []
                try:
                    view()
                    page = "".join(self._page)
                finally:
                    self._page = None
                with _writing():
                    live.update(Text.from_ansi(page), refresh=True)

            yield show

    @property
    def on_terminal(self) -> bool:
        """Whether a person looks at stdout."""
        return sys.stdout.isatty()

    @property
    def width(self) -> int:
        """Columns of stdout; very many where it is no terminal."""
        return self._stdout.width

    @property
    def height(self) -> int:
        """Lines of the terminal."""
        return self._stdout.height

    def flush(self) -> None:
        """Hand everything over, so that a closed pipe or a full disk is met here and not at exit."""
        with _writing():
            sys.stdout.flush()

    # --- how

    @property
    def _speaks(self) -> bool:
        return not (self.json or self.quiet)

    @cached_property
    def _stdout(self) -> Console:
        return _console(sys.stdout)

    @cached_property
    def _stderr(self) -> Console:
        return _console(sys.stderr)

    def _complain(self, text: str, style: str | None = None) -> None:
        try:
            shown = _shown(text, sys.stderr)
            self._write(sys.stderr, self._styled(self._stderr, shown, style) if style else shown + "\n")
            sys.stderr.flush()
        except (OSError, OutputClosedError, EnvironmentFault):
            # There is nobody left to tell; the exit code still says it.
            return

    @staticmethod
    def _styled(console: Console, text: str, style: str) -> str:
        from rich.text import Text

        with console.capture() as capture:
            console.print(Text(text, style=_STYLES[style]), soft_wrap=True)
        return capture.get()

    def _print(self, text: str) -> None:
        """Write to stdout, or to the page that `live` is about to show."""
        if self._page is not None:
            self._page.append(text)
        else:
            self._write(sys.stdout, text)

    @staticmethod
    def _write(stream: TextIO, text: str) -> None:
        with _writing():
            stream.write(text)


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise OutputClosedError from None
    except OSError as error:
        raise EnvironmentFault(f"cannot write the output: {error.strerror or error}") from error


def _shown(text: str, stream: TextIO) -> str:
    """``text`` inert; on a terminal, letters from right to left leave what stands beside them in place."""
    return anchored(inert(text)) if stream.isatty() else inert(text)


def _no_progress(what: str, done: int, total: int) -> None:
    """Nobody is looking."""


def _finite(value: Any) -> Any:
    """``value`` with null for NaN and infinities, which JSON does not have.

    Dictionaries pass through here rather than through pydantic's JSON mode, which mends keys that are not
    valid Unicode: here a key must stay what it is.
    """
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def _folded(findings: Iterable[Finding]) -> Iterator[tuple[str, str | None]]:
    for group in grouped(findings):
        yield f"{group.severity} {group.code} ({group.count:,})", group.severity
        for one in group.shown:
            yield f"  {_said(one)}", None
        if group.hidden:
            where = f" in {group.where}" if group.where else ""
            yield f"  … and {group.hidden:,} more{where}", "dim"


def _said(finding: Finding) -> str:
    """The message, led by the key or file unless it names them itself."""
    for place in (finding.key, finding.file):
        if place is not None:
            return finding.message if place in finding.message else f"{place}: {finding.message}"
    return finding.message


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    terminal = stream.isatty()
    plain = not terminal or bool(os.environ.get("NO_COLOR"))
    width = None if terminal or os.environ.get("COLUMNS") else _PIPED_WIDTH
    return Console(
        file=stream,
        width=width,
        color_system=None if plain else "auto",
        force_terminal=terminal,
        markup=False,
        emoji=False,
        highlight=False,
    )
