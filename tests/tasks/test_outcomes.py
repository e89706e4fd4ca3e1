"""What a failure means: verdict or environment, and under which problem it is told."""

import pytest

from dcp.errors import (
    ChangedError,
    CheckpointError,
    EnvironmentFault,
    ForbiddenError,
    MetadataError,
    NotLoadableError,
    ResourceError,
    UnreachableError,
    UsageError,
)
from dcp.findings import Code, Finding, State, finding
from tasks.outcomes import boundary, failure_of_error, failure_of_report, problem_of

MISSING = finding("keys.missing", "model.w is expected and absent", key="model.w")
GAP = finding("tiling.gap", "rows 3 to 4 of w were never saved", key="w")
WARNING = finding("files.orphan", "__9_0.distcp is in no index")


@pytest.mark.parametrize(
    ("state", "findings", "problem"),
    [
        ("committed", [MISSING], "key-mismatch"),
        ("committed", [MISSING, WARNING], "key-mismatch"),
        ("committed", [MISSING, GAP], "invalid"),
        ("committed", [GAP], "invalid"),
        ("torn", [MISSING], "torn"),
        ("incomplete", [], "incomplete"),
        ("not-dcp", [], "invalid"),
    ],
)
def test_a_validation_is_told_under_one_problem(state: State, findings: list[Finding], problem: str) -> None:
    assert problem_of(state, findings) == problem


def test_a_report_is_a_verdict_with_its_findings_counted() -> None:
    failure = failure_of_report("validate", "invalid", [WARNING, GAP, MISSING, GAP], "nothing")
    assert (failure.final, failure.errors) == (True, 3)
    assert failure.codes == {"tiling.gap": 2, "keys.missing": 1}
    assert failure.message == "tiling.gap: rows 3 to 4 of w were never saved (and 2 more)"
    assert failure.examples[0]["key"] == "w"
    assert failure_of_report("validate", "invalid", [WARNING], "nothing").message == "nothing"


def test_a_million_findings_stay_small() -> None:
    failure = failure_of_report("validate", "invalid", [GAP] * 100_000, "")
    assert failure.errors == 100_000
    assert len(failure.model_dump_json()) < 10_000


@pytest.mark.parametrize(
    ("error", "final", "problem"),
    [
        (CheckpointError("bad", code="records.corrupt"), True, "export"),
        (MetadataError("bad", code="metadata.unsafe"), True, "export"),
        (NotLoadableError("bad", [GAP, GAP]), True, "export"),
        (ChangedError("saved over"), True, "torn"),
        (UnreachableError("no answer"), False, "export"),
        (ForbiddenError("no"), False, "export"),
        (ResourceError("needs 5 GiB, has 4"), False, "export"),
        (UsageError("nothing matches"), False, "export"),
        (ZeroDivisionError("a bug"), False, "export"),
        (OSError(), False, "export"),
    ],
)
def test_only_the_checkpoint_itself_makes_a_verdict(error: Exception, final: bool, problem: str) -> None:
    failure = failure_of_error("export", error)
    assert (failure.final, failure.problem, failure.error) == (final, problem, type(error).__name__)
    assert failure.message


def test_a_damaged_checkpoint_at_validation_is_invalid() -> None:
    assert failure_of_error("validate", CheckpointError("x", code="metadata.empty")).problem == "invalid"
    assert failure_of_error("validate", UnreachableError("x")).problem == "validate"


def test_checkpoint_exceptions_become_exceptions() -> None:
    from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION, CheckpointException

    def failures(*errors: Exception) -> dict[int, WRAPPED_EXCEPTION]:
        from torch.distributed.checkpoint.api import _wrap_exception

        return {rank: _wrap_exception(error) for rank, error in enumerate(errors)}

    @boundary
    def stage(*errors: Exception) -> None:
        raise CheckpointException("read", failures(*errors))

    code: Code = "records.corrupt"
    with pytest.raises(CheckpointError, match="flipped"):
        stage(RuntimeError("a consequence"), CheckpointError("a bit flipped", code=code))
    with pytest.raises(EnvironmentFault, match="rank 0: RuntimeError: the first"):
        stage(RuntimeError("the first"), RuntimeError("the second"))
    with pytest.raises(EnvironmentFault, match="without a cause"):
        stage()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), ValueError("x")])
def test_all_else_passes_the_boundary_unchanged(error: BaseException) -> None:
    @boundary
    def stage() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        stage()
    assert raised.value is error
