"""Which tests share a worker when pytest runs them in parallel.

A file's tests stay together, so that few workers make the same session fixtures. All tests that need the
Prefect server form one more group whatever their file, since it takes long to start. Only a worker knows
which these are (its fixtures are resolved) and only the controller hands tests out, so the names go through
a file of the run; pytest-xdist's own groups are silently ignored by pytest 9.2 (its issue 1386).
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

_FILE = "prefect-tests.json"


def tell_prefect_tests(items: Iterable[pytest.Item], worker: str, run_directory: Path) -> None:
    """Write down which of `items` use `prefect_api`, directly or through another fixture."""
    names = [item.nodeid for item in items if "prefect_api" in getattr(item, "fixturenames", ())]
    own = run_directory / f"{worker}-{_FILE}"
    own.write_text(json.dumps(names))
    own.replace(run_directory / _FILE)


class Scheduling(LoadScopeScheduling):
    """Hands out whole files, and the Prefect tests of all files as one."""

    def __init__(self, config: pytest.Config, log: Any, run_directory: Path) -> None:
        super().__init__(config, log)
        self._file = run_directory / _FILE
        self._prefect_tests: frozenset[str] | None = None

    def _split_scope(self, nodeid: str) -> str:
        if self._prefect_tests is None:
            self._prefect_tests = frozenset(json.loads(self._file.read_text()))
        return "prefect" if nodeid in self._prefect_tests else nodeid.split("::", 1)[0]
