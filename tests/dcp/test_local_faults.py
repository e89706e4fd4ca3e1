"""What a local filesystem refuses is said in its own words, with advice that fits a filesystem."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from dcp.advice import advice_for
from dcp.errors import CkptError, ForbiddenError, OutOfSpaceError, UsageError
from dcp.storage import open_store
from dcp.storage.faults import calling


def _raised(number: int, url: str) -> CkptError:
    def fail() -> None:
        raise OSError(number, os.strerror(number), url)

    with pytest.raises(CkptError) as raised:
        calling(url, fail)
    return raised.value


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_what_is_forbidden_here_is_no_matter_of_a_buckets_credentials(number: int) -> None:
    here, there = _raised(number, "/data/x.pt"), _raised(number, "gs://bucket/x.pt")
    assert isinstance(here, ForbiddenError)
    assert isinstance(there, ForbiddenError)
    assert ("only be read" in str(here)) == (number == errno.EROFS)
    assert "ls -ld" in advice_for(here)
    assert "gcloud" not in advice_for(here)
    assert "gcloud" in advice_for(there)


def test_a_file_that_grows_too_large_is_no_full_disk(tmp_path: Path) -> None:
    """Under a limit that the kernel enforces."""
    code = (
        "import sys\nfrom dcp.advice import advice_for\nfrom dcp.errors import CkptError\n"
        "from dcp.storage import open_store\n"
        "try:\n    with open_store(sys.argv[1]).writer('x.pt') as sink:\n        sink.write(bytes(1 << 20))\n"
        "except CkptError as error:\n    print(type(error).__name__, error, advice_for(error), sep='|')\n"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))

    said = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "place")],
        capture_output=True, text=True, timeout=60, preexec_fn=limit,
    )  # fmt: skip
    kind, message, advice = said.stdout.strip().split("|")
    assert kind == OutOfSpaceError.__name__
    assert "larger than a file may be" in message
    assert "no space left" not in message
    assert "ulimit -f" in advice
    assert list((tmp_path / "place").iterdir()) == []


def test_a_full_disk_is_one() -> None:
    full = _raised(errno.ENOSPC, "/data/x.pt")
    assert "no space left" in str(full)
    assert "Free space" in advice_for(full)


@pytest.mark.parametrize("name", ["x.pt", "below/x.pt"])
def test_a_file_where_a_directory_should_be(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    with (
        pytest.raises(UsageError, match="is a file") as raised,
        open_store(str(tmp_path / "file")).writer(name),
    ):
        pass
    assert "exists already" not in str(raised.value)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_where_nothing_can_be_made() -> None:
    with (
        pytest.raises(ForbiddenError, match="can be made in /proc") as raised,
        open_store("/proc").writer("x.pt"),
    ):
        pass
    assert "ls -ld" in advice_for(raised.value)
