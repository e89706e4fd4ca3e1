"""The environment of a test process: alike on every machine, and deaf to the user's own accounts.

It must be set before gcsfs, prefect or torch is imported, since they read it once.
"""

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_DROPPED_PREFIXES = ("PREFECT_", "AWS_", "GOOGLE_", "FSSPEC_", "CKPT_")
_DROPPED = (
    "STORAGE_EMULATOR_HOST",
    "FORCE_COLOR",
    "CLICOLOR_FORCE",
    "GITHUB_ACTIONS",
    "PY_COLORS",
    # Hundreds of processes import the project: it is to be compiled once.
    "PYTHONDONTWRITEBYTECODE",
)

_FIXED = {
    # Otherwise the first use of each bucket on an emulator waits for half a minute or more.
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "DO_NOT_TRACK": "1",
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "NO_GCE_CHECK": "true",
    "NO_COLOR": "1",
    "OMP_NUM_THREADS": "1",
}


_RUN = "CKPT_TESTS_RUN"


@dataclass(frozen=True, slots=True)
class Places:
    """Temporary directories: `run` is shared by all processes of a test run, `worker` in it is private."""

    run: Path
    worker: Path


def prepare(*, is_worker: bool) -> Places:
    """Set the environment of this process.

    The process that is no worker of another makes the run's directory, and removes it at the end.
    """
    run = Path(os.environ[_RUN]) if is_worker else Path(tempfile.mkdtemp(prefix="ckpt-tests-"))
    worker = Path(tempfile.mkdtemp(prefix="worker-", dir=run))
    for name in list(os.environ):
        if name.startswith(_DROPPED_PREFIXES) or name in _DROPPED:
            del os.environ[name]
    os.environ.update(_FIXED)
    sys.dont_write_bytecode = False
    os.environ[_RUN] = str(run)
    os.environ["PREFECT_HOME"] = str(worker / "prefect")
    os.environ["XDG_STATE_HOME"] = str(worker / "state")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(worker / "inductor")
    wait_for_no_disk()
    return Places(run, worker)


def wait_for_no_disk() -> None:
    """Let `os.fsync` do nothing in this process.

    What a power cut leaves is nothing that a test could look at, and on many disks waiting for it is most of
    what thousands of small files cost. That it is called, and when, tests/dcp/save/test_writer.py tells.
    """
    os.fsync = _no_fsync


def _no_fsync(fd: object) -> None: ...
