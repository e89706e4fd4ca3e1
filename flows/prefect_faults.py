"""Prefect's own failures as faults of the environment, told in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from httpx import HTTPError
from prefect.exceptions import PrefectException

from dcp.errors import EnvironmentFault

_STARTING = ("Failed to reach API", "ephemeral Prefect API server")
"""Prefect raises these as plain RuntimeError."""


@contextmanager
def prefect_answers() -> Iterator[None]:
    """Raise `EnvironmentFault` where Prefect's API does not start or does not answer.

    What was recorded in the ledger until then stands; the next pass goes on from there.
    """
    try:
        yield
    except (HTTPError, PrefectException) as error:
        raise _fault(error) from error
    except RuntimeError as error:
        if any(text in str(error) for text in _STARTING):
            raise _fault(error) from error
        raise


def _fault(error: Exception) -> EnvironmentFault:
    from prefect.settings import PREFECT_API_URL

    reason = " ".join(str(error).split()) or type(error).__name__
    where = PREFECT_API_URL.value()
    if where:
        return EnvironmentFault(
            f"Prefect's API at {where} does not answer ({reason}); check it, or unset PREFECT_API_URL"
        )
    return EnvironmentFault(
        f"Prefect's temporary API server did not start ({reason}); run it again, or start a server with "
        "'prefect server start' and set PREFECT_API_URL"
    )
