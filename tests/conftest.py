"""Fixtures for all tests: real storage servers, the Prefect API, golden data and freshly saved checkpoints.

A session fixture is made once in each worker process, when the first test asks for it.
"""

import atexit
import gc
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import environment

# What collecting imports (torch, Prefect, hundreds of modules of tests) stays to the end: looking through it
# again and again would take as long as importing it, and once more when the process ends.
gc.disable()

_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
_PLACES = environment.prepare(is_worker=bool(_WORKER))
if not _WORKER:
    # A run that ends before it began, as on a wrong option, calls no hook.
    atexit.register(shutil.rmtree, _PLACES.run)

# These read the environment when they are imported.
from tests.support import golden as goldens  # noqa: E402
from tests.support.distribution import Scheduling, longest_first, tell_prefect_tests  # noqa: E402
from tests.support.gcs import FakeGcs, fake_gcs_server  # noqa: E402
from tests.support.harness import PrefectApi, prefect_harness  # noqa: E402
from tests.support.s3 import MotoS3, moto_server  # noqa: E402
from tests.support.train import SavedCheckpoint, make_checkpoint  # noqa: E402

# Whether an example is right does not hang on how busy the machine is. In CI, hypothesis's own profile for it
# is what remains otherwise.
settings.register_profile(
    "unhurried", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unhurried")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/data/terminal anew from what ckpt prints"
    )


def pytest_unconfigure() -> None:
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _WORKER:
        longest_first(items)
        tell_prefect_tests(items, _WORKER, _PLACES.run)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log, _PLACES.run)


@pytest.fixture(scope="session")
def run_directory() -> Path:
    """A temporary directory that all worker processes of the run share."""
    return _PLACES.run


@pytest.fixture(scope="session")
def fake_gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGcs]:
    """A real fake-gcs-server; gs:// URLs of this process, and of those it starts, go to it."""
    with pytest.MonkeyPatch.context() as patch, fake_gcs_server(tmp_path_factory.mktemp("gcs")) as server:
        patch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        yield server


@pytest.fixture
def gs_bucket(fake_gcs: FakeGcs) -> Iterator[str]:
    """The `gs://` URL of an empty bucket of the test's own."""
    url = fake_gcs.make_bucket()
    yield url
    fake_gcs.drop_bucket(url)


@pytest.fixture(scope="session")
def moto_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoS3]:
    """A real moto server; s3:// URLs of this process, and of those it starts, go to it."""
    with pytest.MonkeyPatch.context() as patch, moto_server(tmp_path_factory.mktemp("s3")) as server:
        patch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        yield server


@pytest.fixture
def s3_bucket(moto_s3: MotoS3) -> Iterator[str]:
    """The `s3://` URL of an empty bucket of the test's own."""
    url = moto_s3.make_bucket()
    yield url
    moto_s3.drop_bucket(url)


@pytest.fixture(scope="session")
def prefect_api(run_directory: Path) -> Iterator[PrefectApi]:
    """Prefect's test harness: flows run against a real server of the run's own."""
    with prefect_harness(run_directory) as api:
        yield api


@pytest.fixture
def golden() -> Callable[[str], Path]:
    """`golden(name)`: the directory of a golden checkpoint, to be read only."""
    return goldens.find


@pytest.fixture
def golden_copy(tmp_path: Path) -> Callable[[str], Path]:
    """`golden_copy(name)`: a copy in `tmp_path / name` to be damaged, with the times of a fresh save."""
    return lambda name: goldens.copy(name, tmp_path / name)


@pytest.fixture(scope="session")
def fsdp2_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> SavedCheckpoint:
    """What two ranks saved after training, with the expected values beside it; to be read only."""
    return make_checkpoint(tmp_path_factory.mktemp("fsdp2") / "step_2")
