"""Programs that tests want beside Python: where they are, and what their absence means.

On a person's machine, tests without their program are skipped, or use something else. In CI (the environment
variable CI is set, as .ci/run does it) absence is an error: what is never run there guards nothing.
"""

import os
import shutil
from pathlib import Path

import pytest


class MissingToolError(RuntimeError):
    """CI lacks a program."""


def postgres_programs() -> Path | None:
    """The directory of the newest installed PostgreSQL server's programs; None if there is none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if found:
        return found[-1].parent
    initdb = _looked_up("PostgreSQL", "postgresql", "initdb")
    return initdb.resolve().parent if initdb else None


def browser_program() -> Path | None:
    """A Chromium; None if there is none."""
    return _looked_up("Chromium", "chromium", "chromium", "chromium-browser", "google-chrome")


def required(program: Path | None) -> Path:
    """`program`; without it, skip the test that asks for it."""
    if program is None:
        pytest.skip("a program that this test runs is not installed: CONTRIBUTING.md says which")
    return program


def _looked_up(name: str, package: str, *programs: str) -> Path | None:
    found = next(filter(None, map(shutil.which, programs)), None)
    if found is None and os.environ.get("CI"):
        raise MissingToolError(f"CI must have {name}, which .ci/run installs (apt-get install {package})")
    return Path(found) if found else None
