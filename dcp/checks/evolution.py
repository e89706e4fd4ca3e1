"""What became of each tensor since an earlier step: unchanged, or suddenly of another size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dcp.checks.scrub import TensorHealth
from dcp.findings import Finding, finding

JUMP = 10.0
"""A norm that grew or shrank by more than this factor between two steps is told."""


def check_evolution(
    now: Mapping[str, TensorHealth], before: Mapping[str, TensorHealth], source: str
) -> Iterator[Finding]:
    """Compare two scrubs of steps of one run.

    Args:
        now: content of the step being validated.
        before: content of the earlier one.
        source: where the earlier one is.
    """
    unchanged = [key for key, tensor in now.items() if _unchanged(tensor, before.get(key))]
    if unchanged:
        yield finding(
            "values.unchanged",
            f"{len(unchanged)} of {len(now)} tensors are the same as in {source}, e.g. {unchanged[0]}",
            key=unchanged[0],
            keys=unchanged,
            count=len(unchanged),
        )
    for key, tensor in now.items():
        earlier = before.get(key)
        if earlier is None or not tensor.norm or not earlier.norm:
            continue
        ratio = tensor.norm / earlier.norm
        if not 1 / JUMP <= ratio <= JUMP:
            yield finding(
                "values.norm-jump",
                f"{key}: its norm is {tensor.norm:.4g}, {ratio:.3g} times what it was in {source}",
                key=key,
                expected=earlier.norm,
                actual=tensor.norm,
            )


def _unchanged(tensor: TensorHealth, earlier: TensorHealth | None) -> bool:
    """Whether a tensor that holds something is the same; zeros and empty tensors stay as they are."""
    return earlier is not None and tensor.digest == earlier.digest and bool(tensor.norm)
