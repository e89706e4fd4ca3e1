"""From any exception to what a person is told: one line, the next step, the exit code.

The exit codes are a contract: 1 the checkpoint or artifact has an error finding, 2 wrong usage or settings,
3 the environment failed or this program did. Tracebacks belong to ``--debug`` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcp.errors import (
    CheckpointError,
    CkptError,
    EnvironmentFault,
    NotLoadableError,
    ResourceError,
    UsageError,
)

if TYPE_CHECKING:
    from dcp.findings import Finding

FINE = 0
FAULTY = 1
USAGE = 2
ENVIRONMENT = 3
SIGNALLED = 128
"""What shells add to the number of the signal that ended a command."""
INTERRUPTED = 130
"""As shells report a command that SIGINT ended."""
OUTPUT_CLOSED = 141
"""As shells report a command that SIGPIPE ended: whoever read the output went away."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a command could not do what was asked."""

    kind: str
    """Name of the error's class."""
    message: str
    advice: str | None
    exit_code: int
    findings: tuple[Finding, ...] = ()

    def document(self) -> dict[str, Any]:
        """The JSON document that takes the place of the report."""
        return {
            "error": {
                "class": self.kind,
                "message": self.message,
                "advice": self.advice,
                "exit_code": self.exit_code,
                "findings": [found.model_dump() for found in self.findings],
            }
        }


def failure_of(error: BaseException, url: str = "URL") -> Failure:
    """The failure that ``error`` is; ``url`` is what the command was asked to work on."""
    known = _known(error)
    if known is None:
        return Failure(
            kind=type(error).__name__,
            message=f"internal error: {type(error).__name__}: {error}, run again with --debug",
            advice=None,
            exit_code=ENVIRONMENT,
        )
    from dcp.advice import advice_for

    return Failure(
        kind=type(known).__name__,
        message=str(known),
        advice=advice_for(known, url=url) or None,
        exit_code=known.exit_code,
        findings=_findings(known),
    )


def usage_failure(message: str, help_command: str) -> Failure:
    """The failure of a command line that cannot be parsed."""
    return Failure(
        kind=UsageError.__name__,
        # The word is that of the library that converts; people made no value error.
        message=message.replace(": Value error, ", ": ", 1),
        advice=f"see {help_command} --help",
        exit_code=USAGE,
    )


def _known(error: BaseException) -> CkptError | None:
    if isinstance(error, CkptError):
        return error
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return EnvironmentFault(f"the package {package} is not installed; pip install {package}")
    if isinstance(error, MemoryError):
        return ResourceError("out of memory; give a smaller --memory-budget or a larger machine")
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return EnvironmentFault(f"{place}{error.strerror}")
    return None


def _findings(error: CkptError) -> tuple[Finding, ...]:
    if isinstance(error, NotLoadableError):
        return error.findings
    return (error.as_finding(),) if isinstance(error, CheckpointError) else ()
