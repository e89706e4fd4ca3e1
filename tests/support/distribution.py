"""Which tests share a worker when pytest runs them in parallel.

A file's tests stay together, so that few workers make the same session fixtures. All tests that need the
Prefect server form one more group whatever their file, since it takes long to start. Only a worker knows
which these are (its fixtures are resolved) and only the controller hands tests out, so the names go through
a file of the run; pytest-xdist's own groups are silently ignored by pytest 9.2 (its issue 1386).

The groups that take longest go first, so that no worker waits long for the last one.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

_FILE = "prefect-tests.json"
_PREFECT = "prefect"
_EACH = 0.15
"""Seconds that most tests take at most."""
SECONDS = {
    _PREFECT: 190,
    "tests/dcp/exporting/test_export.py": 20,
    "tests/dcp/exporting/test_memory.py": 20,
    "tests/dcp/exporting/test_replacing.py": 35,
    "tests/dcp/exporting/test_safetensors.py": 10,
    "tests/dcp/load/test_gloo.py": 40,
    "tests/dcp/load/test_planners_ranks.py": 10,
    "tests/dcp/load/test_simulated.py": 20,
    "tests/dcp/save/test_importing.py": 25,
    "tests/dcp/save/test_writer.py": 25,
    "tests/dcp/test_claims.py": 10,
    "tests/dcp/test_conformance.py": 15,
    "tests/dcp/test_guide.py": 15,
    "tests/dcp/test_partial.py": 5,
    "tests/dcp/test_scrub.py": 10,
    "tests/dcp/test_transport.py": 30,
    "tests/dcp/test_wire.py": 5,
    "tests/dcp/test_wire_bombs.py": 15,
    "tests/flows/cli/test_golden.py": 10,
    "tests/flows/cli/test_lifecycle_commands.py": 10,
    "tests/flows/cli/test_load_and_export.py": 10,
    "tests/flows/cli/test_process.py": 10,
    "tests/flows/report/test_accessibility.py": 30,
    "tests/flows/report/test_browser.py": 20,
    "tests/flows/test_demo.py": 65,
    "tests/flows/test_deploying.py": 80,
    "tests/flows/test_following.py": 10,
    "tests/flows/test_kill.py": 20,
    "tests/flows/test_machine.py": 15,
    "tests/flows/test_passes.py": 25,
    "tests/flows/test_prefect_server.py": 25,
    "tests/flows/test_retiring.py": 10,
    "tests/flows/test_run_alerts.py": 10,
    "tests/tasks/test_alert.py": 10,
    "tests/test_support.py": 15,
}
"""What the groups took, roughly, that take far longer than others of as many tests."""


def longest_first(items: list[pytest.Item]) -> None:
    """Sort `items` by what their group takes; those of a group stay in their order."""
    groups = {item: _PREFECT if _is_prefect(item) else _file_of(item.nodeid) for item in items}
    sizes = Counter(groups.values())
    items.sort(key=lambda item: -SECONDS.get(groups[item], _EACH * sizes[groups[item]]))


def tell_prefect_tests(items: Iterable[pytest.Item], worker: str, run_directory: Path) -> None:
    """Write down which of `items` use `prefect_api`, directly or through another fixture."""
    names = [item.nodeid for item in items if _is_prefect(item)]
    own = run_directory / f"{worker}-{_FILE}"
    own.write_text(json.dumps(names))
    own.replace(run_directory / _FILE)


class Scheduling(LoadScopeScheduling):
    """Hands out whole files, and the Prefect tests of all files as one, in the order of the collection."""

    def __init__(self, config: pytest.Config, log: Any, run_directory: Path) -> None:
        super().__init__(config, log)
        # By default xdist begins with the files of most tests, and ends with the few that take minutes.
        config.option.loadscopereorder = False
        self._file = run_directory / _FILE
        self._prefect_tests: frozenset[str] | None = None

    def _split_scope(self, nodeid: str) -> str:
        if self._prefect_tests is None:
            self._prefect_tests = frozenset(json.loads(self._file.read_text()))
        return _PREFECT if nodeid in self._prefect_tests else _file_of(nodeid)


def _is_prefect(item: pytest.Item) -> bool:
    return "prefect_api" in getattr(item, "fixturenames", ())


def _file_of(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]
