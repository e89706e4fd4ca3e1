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
_SLOW = 20
"""Other tests that take as long as one that is marked slow."""


def longest_first(items: list[pytest.Item]) -> None:
    """Sort `items` by what their group takes; those of a group stay in their order."""
    groups = {item: "prefect" if _is_prefect(item) else _file_of(item.nodeid) for item in items}
    weights = Counter[str]()
    for item, group in groups.items():
        weights[group] += _SLOW if item.get_closest_marker("slow") else 1
    items.sort(key=lambda item: -weights[groups[item]])


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
        return "prefect" if nodeid in self._prefect_tests else _file_of(nodeid)


def _is_prefect(item: pytest.Item) -> bool:
    return "prefect_api" in getattr(item, "fixturenames", ())


def _file_of(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]
