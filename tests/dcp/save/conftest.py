"""A place to save to in every kind of storage."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest


@pytest.fixture(params=["local", "memory", "gs", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a prefix that does not exist yet, on real servers where there are servers."""
    if request.param == "local":
        yield str(tmp_path / "run" / "step_1")
    elif request.param == "memory":
        bucket = f"memory://bucket-{uuid.uuid4().hex}"
        yield f"{bucket}/step_1"
        files = fsspec.filesystem("memory")
        if files.exists(bucket):
            files.rm(bucket, recursive=True)
    else:
        yield request.getfixturevalue(f"{request.param}_bucket") + "/run/step_1"
