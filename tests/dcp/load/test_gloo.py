"""The gloo engine: real ranks agree with simulated ones, and none of their ends goes unnoticed."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from dcp.checkpoint import open_checkpoint
from dcp.errors import EnvironmentFault, RecordError, ResourceError, UnreachableError, UsageError
from dcp.layout import Layout
from dcp.load import test_load as load_test
from dcp.load.gloo import load_gloo
from dcp.load.gloo_rank import Reader, result_of
from tests.dcp.load.expectations import Sabotage, save
from tests.support.train import SavedCheckpoint

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("layout", "reader"), [("fsdp=3", "bucket"), ("fsdp=2,tp=2", "torch")])
def test_real_ranks_agree_with_simulated_ones(
    fsdp2_checkpoint: SavedCheckpoint, layout: str, reader: Reader
) -> None:
    checkpoint = open_checkpoint(str(fsdp2_checkpoint.path))
    [real] = load_gloo(checkpoint, [Layout.parse(layout)], timeout=120, reader=reader)
    [simulated] = load_test(str(fsdp2_checkpoint.path), [layout]).layouts
    assert real.ok
    assert real.findings == []
    for same in ("layout", "ranks", "bytes_needed", "rank_bytes", "tensors", "objects", "objects_scanned"):
        assert getattr(real, same) == getattr(simulated, same), same
    assert real.bytes_read >= simulated.bytes_needed
    assert len(real.rank_seconds) == real.ranks


def test_damage_is_led_back_to_key_file_and_rank(tmp_path: Path) -> None:
    path = save({"a": torch.zeros(50, 1000), "evil": Sabotage(tmp_path / "ran"), "n": 1}, tmp_path / "step")
    [data] = path.glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[100_000] ^= 1
    data.write_bytes(content)
    report = load_test(str(path), ["fsdp=1"], engine="gloo", timeout=120)
    codes = {(found.code, found.key, found.file, found.severity) for found in report.layouts[0].findings}
    assert codes == {
        ("records.corrupt", "a", data.name, "error"),
        ("records.unsafe", "evil", data.name, "error"),
    }
    [corrupt] = [found for found in report.layouts[0].findings if found.code == "records.corrupt"]
    assert corrupt.detail["rank"] == 0
    assert not report.ok
    assert not (tmp_path / "ran").exists()


def test_a_missing_file_is_told_once(golden_copy: Callable[[str], Path]) -> None:
    path = golden_copy("torch_fsdp_tp_2x2")
    (path / "__1_0.distcp").unlink()
    report = load_test(str(path), ["fsdp=2"], engine="gloo", timeout=120)
    found = [(found.code, found.file) for found in report.layouts[0].findings]
    assert set(found) == {("files.missing", "__1_0.distcp")}
    assert not report.ok


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "dcp.load.gloo_rank" in child.cmdline()]


def test_a_rank_that_dies_ends_the_load(fsdp2_checkpoint: SavedCheckpoint) -> None:
    def kill_one() -> None:
        while not (found := children()):
            time.sleep(0.05)
        found[-1].kill()

    killer = threading.Thread(target=kill_one)
    killer.start()
    started = time.monotonic()
    with pytest.raises(EnvironmentFault, match=r"fsdp=2: rank \d was killed by signal 9"):
        load_test(str(fsdp2_checkpoint.path), ["fsdp=2"], engine="gloo", timeout=120)
    killer.join()
    assert time.monotonic() - started < 60
    assert children() == []


def test_the_time_is_limited(fsdp2_checkpoint: SavedCheckpoint) -> None:
    with pytest.raises(EnvironmentFault, match=r"rank 0, 1 did not finish within 0.2 s and was killed"):
        load_test(str(fsdp2_checkpoint.path), ["fsdp=2"], engine="gloo", timeout=0.2)
    assert children() == []


def test_what_cannot_be_started_is_refused(golden: Callable[[str], Path]) -> None:
    url = str(golden("torch_tied"))
    with pytest.raises(ResourceError, match="1024 processes takes about"):
        load_test(url, ["fsdp=1024"], engine="gloo")
    with pytest.raises(UsageError, match="other processes"):
        load_test(url, ["fsdp=2"], engine="gloo", token=object())
    with pytest.raises(UsageError, match="simulated or gloo"):
        load_test(url, ["fsdp=2"], engine="mpi")  # type: ignore[arg-type]


def test_failures_are_led_back_to_their_cause() -> None:
    record = RecordError("w: damaged", code="records.corrupt", key="w", file="f", offset=3)
    found = result_of(CheckpointException("read", {2: (record, None), 3: (record, None)}), rank=0)
    assert (found.rank, found.environment, found.failed) == (2, None, True)
    [finding] = found.findings
    assert (finding.code, finding.key, finding.file) == ("records.corrupt", "w", "f")
    assert finding.detail == {"offset": 3, "rank": 2}
    unreachable = CheckpointException("read", {1: (UnreachableError("no answer"), None)})
    assert result_of(unreachable, rank=0).environment == "rank 1: no answer"
    unknown = result_of(CheckpointException("read", {1: (KeyError("x"), None)}), rank=0)
    assert [f.code for f in unknown.findings] == ["records.undecodable"]
    assert result_of(ConnectionResetError("gone"), rank=4).indirect


def test_ranks_do_not_outlive_who_started_them(fsdp2_checkpoint: SavedCheckpoint, tmp_path: Path) -> None:
    import subprocess
    import sys

    code = f"""
import sys
from dcp.load import test_load
test_load({str(fsdp2_checkpoint.path)!r}, ["fsdp=2"], engine="gloo", timeout=120)
"""
    starter = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)})
    process = psutil.Process(starter.pid)
    while not (ranks := [c for c in process.children() if "dcp.load.gloo_rank" in c.cmdline()]):
        time.sleep(0.05)
        assert starter.poll() is None
    starter.kill()
    starter.wait()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive
