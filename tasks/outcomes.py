"""What a failed stage means: a verdict on the step's bytes, or a fault of the environment.

`failure_of_report` and `failure_of_error` turn an unfavourable report and any exception into the one
`Failure` that the ledger records; `boundary` makes sure that what leaves a stage is an `Exception` at all,
since torch's `CheckpointException` derives from `BaseException` and would end a worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

from dcp.errors import (
    ChangedError,
    CheckpointError,
    CkptError,
    EnvironmentFault,
    NotLoadableError,
)
from dcp.findings import Finding, State, errors_of
from tasks.ledger import Failure, Stage

P = ParamSpec("P")
R = TypeVar("R")

EXAMPLES = 20
"""Error findings kept in full in a ``failed-N`` record."""

PROBLEM_OF_STAGE: dict[Stage, str] = {
    "validate": "validate",
    "test-load": "test-load",
    "export": "export",
    "publish": "publish",
}
_PROBLEM_OF_STATE: dict[State, str] = {"torn": "torn", "incomplete": "incomplete", "writing": "incomplete"}


class StageFailedError(CkptError):
    """A stage failed elsewhere, where its ``failure`` was worked out."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def problem_of(state: State, findings: Sequence[Finding]) -> str:
    """Under which problem an unfavourable validation is told."""
    if state in _PROBLEM_OF_STATE:
        return _PROBLEM_OF_STATE[state]
    codes = {found.code for found in errors_of(findings)}
    return "key-mismatch" if codes and all(code.startswith("keys.") for code in codes) else "invalid"


def failure_of_report(stage: Stage, problem: str, findings: Sequence[Finding], otherwise: str) -> Failure:
    """The final failure that a report's error findings make; ``otherwise`` is said where it has none."""
    errors = list(errors_of(findings))
    codes = Counter(found.code for found in errors)
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        message = f"{errors[0].code}: {errors[0].message}{more}"
    else:
        message = otherwise
    return Failure(
        stage=stage,
        problem=problem,
        final=True,
        message=message,
        codes=dict(codes),
        errors=len(errors),
        examples=[found.model_dump(mode="json") for found in errors[:EXAMPLES]],
    )


def failure_of_error(stage: Stage, error: Exception) -> Failure:
    """The failure that an exception makes: final only where the checkpoint itself is at fault."""
    if isinstance(error, StageFailedError):
        return error.failure
    problem = PROBLEM_OF_STAGE[stage]
    if isinstance(error, CheckpointError):
        if isinstance(error, ChangedError):
            problem = "torn"
        elif stage == "validate":
            problem = "invalid"
        findings = error.findings if isinstance(error, NotLoadableError) else (error.as_finding(),)
        failure = failure_of_report(stage, problem, findings, str(error))
        return failure.model_copy(update={"message": str(error), "error": type(error).__name__})
    message = str(error) or type(error).__name__
    if not isinstance(error, CkptError):
        message = f"{type(error).__name__}: {message}"
    return Failure(stage=stage, problem=problem, final=False, message=message, error=type(error).__name__)


def boundary(function: Callable[P, R]) -> Callable[P, R]:
    """Let nothing but `Exception` leave a stage.

    A `CheckpointException` is replaced by the first real cause among its ranks' failures.
    """

    @wraps(function)
    def bounded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            if not _is_checkpoint_exception(error):
                raise
            raise _cause(error) from error

    return bounded


def _is_checkpoint_exception(error: BaseException) -> bool:
    return any(kind.__name__ == "CheckpointException" for kind in type(error).__mro__)


def _cause(error: BaseException) -> Exception:
    """The first failure of any rank that is in the package's tree, else what the first rank said."""
    causes = []
    for rank, failure in sorted(getattr(error, "failures", {}).items()):
        # torch pairs each exception with a formatted traceback.
        cause = failure[0] if isinstance(failure, tuple) else failure
        if isinstance(cause, CkptError):
            return cause
        causes.append(f"rank {rank}: {type(cause).__name__}: {cause}")
    return EnvironmentFault(causes[0] if causes else f"{type(error).__name__} without a cause")
