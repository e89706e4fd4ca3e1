"""Prefect's own test server, entered at most once in a whole test run since it takes long to start."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PrefectApi:
    """The running server. `env` is what a subprocess needs to use it too."""

    url: str

    @property
    def env(self) -> dict[str, str]:
        return {"PREFECT_API_URL": self.url}


@contextmanager
def prefect_harness(run_directory: Path) -> Iterator[PrefectApi]:
    """Enter the harness; `run_directory` is shared by all processes of the run, which may enter only one.

    Raises:
        RuntimeError: a second process of the same run asks for it.
    """
    from prefect.settings import get_current_settings
    from prefect.testing.utilities import prefect_test_harness

    try:
        (run_directory / "prefect-harness").touch(exist_ok=False)
    except FileExistsError:
        raise RuntimeError(
            "a second Prefect harness in one run: tests that use `prefect_api` must share a worker "
            "(tests/support/distribution.py sees to that)"
        ) from None
    with prefect_test_harness(server_startup_timeout=120):
        yield PrefectApi(str(get_current_settings().api.url))
