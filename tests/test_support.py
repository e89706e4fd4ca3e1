"""The parts under the tests are real: servers that store and refuse, ranks that train, one Prefect server."""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import fsspec
import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from tests.support.distribution import SECONDS
from tests.support.gcs import FakeGcs, fake_gcs_server
from tests.support.golden import GOLDENS, ROOT, SAVED_AT
from tests.support.harness import PrefectApi, prefect_harness
from tests.support.ranks import RankError, run_ranks
from tests.support.s3 import moto_server
from tests.support.tools import MissingToolError, browser_program, required
from tests.support.train import SavedCheckpoint, make_checkpoint


@pytest.mark.parametrize("bucket", ["gs_bucket", "s3_bucket"])
def test_bucket_stores_and_creates_only_if_absent(bucket: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(bucket)
    fs, root = fsspec.url_to_fs(url, use_listings_cache=False)
    assert fs.find(root) == []

    fs.pipe_file(f"{root}/run/step_1/.metadata", b"0123456789")
    assert fs.cat_file(f"{root}/run/step_1/.metadata", start=2, end=5) == b"234"
    assert fs.find(root) == [f"{root}/run/step_1/.metadata"]

    fs.pipe_file(f"{root}/marker", b"first", mode="create")
    with pytest.raises(FileExistsError):
        fs.pipe_file(f"{root}/marker", b"second", mode="create")
    assert fs.cat_file(f"{root}/marker") == b"first"


@pytest.mark.parametrize("server", ["fake_gcs", "moto_s3"])
def test_buckets_are_apart_and_can_be_dropped(server: str, request: pytest.FixtureRequest) -> None:
    store = request.getfixturevalue(server)
    one, other = store.make_bucket(), store.make_bucket()
    fs, _ = fsspec.url_to_fs(one, use_listings_cache=False)
    fs.pipe_file(f"{one}/a b/ü%?", b"x")
    assert fs.find(other) == []
    for url in (one, other):
        store.drop_bucket(url)
    fs.invalidate_cache()
    assert not fs.exists(one)


def test_gcs_bucket_can_have_a_chosen_name(fake_gcs: FakeGcs) -> None:
    assert fake_gcs.make_bucket("chosen-name") == "gs://chosen-name"
    fake_gcs.drop_bucket("gs://chosen-name")


@pytest.mark.parametrize("server", [fake_gcs_server, moto_server])
def test_server_ends_with_its_context(server: Callable, tmp_path: Path) -> None:
    before = _descendants()
    with server(tmp_path) as running:
        assert _descendants() > before
        endpoint = running.endpoint
    assert _descendants() == before
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(endpoint, timeout=60)


def test_server_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time, pathlib\n"
        "from tests.support.gcs import fake_gcs_server\n"
        "with fake_gcs_server(pathlib.Path(sys.argv[1])) as server:\n"
        "    print(server.endpoint, flush=True)\n"
        "    time.sleep(60)\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], cwd=Path(__file__).parents[1], stdout=subprocess.PIPE
    )
    with starter:
        assert starter.stdout is not None
        endpoint = starter.stdout.readline().decode().strip()
        family = psutil.Process(starter.pid).children(recursive=True)
        assert len(family) == 2
        urllib.request.urlopen(endpoint + "/_internal/healthcheck", timeout=60).close()
        starter.kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []


def test_two_ranks_saved_what_is_expected(fsdp2_checkpoint: SavedCheckpoint) -> None:
    files = sorted(path.name for path in fsdp2_checkpoint.path.iterdir())
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    loaded = _load_flat(fsdp2_checkpoint.path)
    _assert_equal(loaded, fsdp2_checkpoint.expected())
    assert loaded["step"] == 2
    assert loaded["optim.state.head.weight.exp_avg"].abs().sum() > 0


def test_tensor_parallel_checkpoint_is_split_in_two_dimensions(tmp_path: Path) -> None:
    saved = make_checkpoint(tmp_path / "step_1", ranks=4, tp=2, steps=1, layers=1, extras={"note": "kept"})
    index = checkpoint.FileSystemReader(saved.path).read_metadata()
    chunks = index.state_dict_metadata["model.layers.0.w2.weight"].chunks
    assert {tuple(chunk.offsets) for chunk in chunks} == {(0, 0), (0, 64), (16, 0), (16, 64)}
    loaded = _load_flat(saved.path)
    _assert_equal(loaded, saved.expected())
    assert loaded["note"] == "kept"


def test_a_checkpoint_is_never_saved_over_another(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="exists"):
        make_checkpoint(tmp_path)


def test_ranks_form_a_group_and_see_the_callers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_TEST_VALUE", "7")
    assert run_ranks(_sum_of_ranks, 3, 10) == [(0, 13, "7"), (1, 13, "7"), (2, 13, "7")]


def test_a_failing_rank_is_told_and_ends_the_others() -> None:
    with pytest.raises(RankError, match=r"rank 1 failed(?s:.)*ValueError: no such thing"):
        run_ranks(_rank_one_raises, 2)


def test_a_dying_rank_is_told() -> None:
    with pytest.raises(RankError, match="rank 1 died"):
        run_ranks(_rank_one_dies, 2)


def test_hanging_ranks_are_ended_in_time() -> None:
    run_ranks(_nothing, 1)  # the server process stays: it must not count as left over
    before = _descendants()
    started = time.monotonic()
    with pytest.raises(RankError, match=r"ranks \[0, 1\] did not finish in time"):
        run_ranks(_hang, 2, timeout=4)
    assert time.monotonic() - started < 50
    assert _descendants() == before


def test_a_flow_runs_on_the_one_server(prefect_api: PrefectApi, run_directory: Path) -> None:
    from prefect import flow, get_client
    from prefect.context import get_run_context

    @flow
    def doubled(value: int) -> tuple[int, str]:
        return 2 * value, str(get_run_context().flow_run.id)

    value, run_id = doubled(21)
    assert value == 42
    with get_client(sync_client=True) as client:
        assert str(client.api_url).rstrip("/") == prefect_api.url
        assert client.read_flow_run(run_id).state.is_completed()

    with pytest.raises(RuntimeError, match="a second Prefect harness"), prefect_harness(run_directory):
        pass


def test_goldens_are_all_there() -> None:
    assert {golden.name for golden in GOLDENS if golden.expected is None} == {"not_dcp_verl_fsdp"}
    named = {golden.expected for golden in GOLDENS if golden.expected}
    assert named == set(ROOT.glob("*.expected.pt"))
    assert {golden.place.split("/")[0] for golden in GOLDENS} == {
        p.name for p in ROOT.iterdir() if p.is_dir()
    }
    assert all(golden.directory.is_dir() and golden.ranks >= 1 for golden in GOLDENS)


def test_golden_copy_has_the_times_of_a_fresh_save(
    golden: Callable[[str], Path], golden_copy: Callable[[str], Path]
) -> None:
    copy = golden_copy("torch_fsdp2_zstd")
    source = golden("torch_fsdp2_zstd")
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == {
        p.name: p.read_bytes() for p in source.iterdir()
    }
    times = {path.name: path.stat().st_mtime for path in copy.iterdir()}
    assert times.pop(".metadata") == SAVED_AT + 1
    assert set(times.values()) == {SAVED_AT}
    (copy / ".metadata").write_bytes(b"")
    assert (source / ".metadata").stat().st_size > 0


def test_an_unknown_golden_is_refused(golden: Callable[[str], Path]) -> None:
    assert golden("accelerate_fsdp2").is_dir()
    with pytest.raises(LookupError, match="no golden called 'torch_tide'"):
        golden("torch_tide")


def test_a_missing_program_skips_a_test_but_fails_in_ci(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CI", raising=False)
    assert browser_program() is None
    with pytest.raises(pytest.skip.Exception):
        required(browser_program())
    monkeypatch.setenv("CI", "true")
    with pytest.raises(MissingToolError, match="apt-get install chromium"):
        required(browser_program())


def test_what_is_said_to_take_long_is_there() -> None:
    files = [name for name in SECONDS if name.startswith("tests/")]
    assert len(files) > 20
    assert [name for name in files if not (Path(__file__).parents[1] / name).is_file()] == []


def _descendants() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _load_flat(directory: Path) -> dict[str, object]:
    state: dict[str, object] = {}
    planner = _EmptyStateDictLoadPlanner()
    reader = checkpoint.FileSystemReader(directory)
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    flat, _ = checkpoint._nested_dict.flatten_state_dict(state)
    return flat


def _assert_equal(loaded: dict[str, object], expected: dict[str, object]) -> None:
    assert set(loaded) == set(expected)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert loaded[key].dtype == value.dtype, key
            assert torch.equal(loaded[key], value), key
        else:
            assert loaded[key] == value, key


def _nothing() -> None: ...


def _sum_of_ranks(start: int) -> tuple[int, int, str]:
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_rank(), start + int(total), os.environ["CKPT_TEST_VALUE"]


def _rank_one_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no such thing")
    dist.barrier()


def _rank_one_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    time.sleep(60)


def _hang() -> None:
    time.sleep(60)
