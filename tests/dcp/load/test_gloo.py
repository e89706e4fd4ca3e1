"""The gloo engine: real ranks agree with simulated ones, and none of their ends goes unnoticed."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from dcp.checkpoint import open_checkpoint
from dcp.errors import EnvironmentFault, RecordError, ResourceError, UnreachableError, UsageError
from dcp.layout import Layout
from dcp.load import test_load as load_test
from dcp.load.gloo import _collect, _Rank, load_gloo
from dcp.load.gloo_rank import result_of
from dcp.load.report import Reader
from dcp.tp_rules import TpRules
from tests.dcp.load.expectations import Sabotage, save
from tests.support.train import SavedCheckpoint
from tests.support.waiting import until

pytestmark = pytest.mark.slow


RULES = {"*.w1.*": "column", "*.w2.*": "row", "*.emb.*": "column"}


@pytest.mark.parametrize(
    ("layout", "rules", "reader"),
    [
        ("fsdp=3", None, "bucket"),
        ("fsdp=2,tp=2", RULES, "bucket"),
        ("tp=3", None, "torch"),
    ],
    ids=["rows", "rows and columns", "columns with torch's reader"],
)
def test_real_ranks_agree_with_simulated_ones(
    fsdp2_checkpoint: SavedCheckpoint, layout: str, rules: dict[str, object] | None, reader: Reader
) -> None:
    checkpoint = open_checkpoint(str(fsdp2_checkpoint.path))
    ruled = Layout.parse(layout, None if rules is None else TpRules.of(rules))
    [real] = load_gloo(checkpoint, [ruled], timeout=240, reader=reader)
    [simulated] = load_test(str(fsdp2_checkpoint.path), [layout], tp_rules=rules).layouts
    assert real.ok
    assert simulated.ok
    if reader == "bucket":
        assert simulated.rank_read == pytest.approx(real.rank_read, rel=0.001)
        assert simulated.rank_requests == pytest.approx(real.rank_requests, abs=2)
    assert real.bytes_read == sum(real.rank_read)
    assert real.requests == sum(real.rank_requests)
    assert all(seconds > 0 for seconds in (*real.rank_seconds, *simulated.rank_seconds))
    assert real.findings == []
    for same in ("layout", "ranks", "bytes_needed", "rank_bytes", "tensors", "objects", "objects_scanned"):
        assert getattr(real, same) == getattr(simulated, same), same
    assert real.bytes_read >= simulated.bytes_needed
    assert len(real.rank_seconds) == len(simulated.rank_seconds) == real.ranks


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


def test_what_torchs_reader_stumbles_over_is_led_back_to_key_and_file(tmp_path: Path) -> None:
    path = save({"a": torch.zeros(50, 1000), "b": torch.ones(3), "n": 1}, tmp_path / "step")
    [data] = path.glob("*.distcp")
    checkpoint = open_checkpoint(str(path))
    [chunk] = checkpoint.index.tensors[0].chunks
    assert chunk.record is not None
    content = bytearray(data.read_bytes())
    end = chunk.record.end
    content[end - 300 : end] = bytes(300)  # the directory of the record's archive
    data.write_bytes(content)
    [report] = load_gloo(checkpoint, [Layout(fsdp=2)], timeout=240, reader="torch")
    assert not report.ok
    first, *_, last = report.findings
    assert (first.key, first.file, first.severity) == ("a", data.name, "error")
    assert first.detail["rank"] in (0, 1)
    assert "torch's load failed" in last.message


def test_a_missing_file_is_told_once(golden_copy: Callable[[str], Path]) -> None:
    path = golden_copy("torch_fsdp_tp_2x2")
    (path / "__1_0.distcp").unlink()
    report = load_test(str(path), ["fsdp=2"], engine="gloo", timeout=120)
    found = [(found.code, found.file) for found in report.layouts[0].findings]
    assert set(found) == {("files.missing", "__1_0.distcp")}
    assert not report.ok


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "dcp.load.gloo_start" in child.cmdline()]


def begun() -> list[psutil.Process]:
    """The two ranks of a load, once both are there."""
    until(lambda: len(children()) == 2)
    return children()


def test_a_rank_that_dies_ends_the_load(fsdp2_checkpoint: SavedCheckpoint) -> None:
    killed: list[float] = []

    def kill_one() -> None:
        # A stopped rank keeps the other waiting for it, wherever in the load that is.
        stopped = begun()[-1]
        stopped.suspend()
        time.sleep(3)
        killed.append(time.monotonic())
        stopped.kill()

    killer = threading.Thread(target=kill_one)
    killer.start()
    checkpoint = open_checkpoint(str(fsdp2_checkpoint.path))
    with pytest.raises(EnvironmentFault, match=r"fsdp=2: rank \d was killed by signal 9"):
        load_gloo(checkpoint, [Layout(fsdp=2)], timeout=240)
    killer.join(60)
    assert time.monotonic() - killed[0] < 20
    assert children() == []


def test_a_rank_that_hangs_is_killed_when_the_time_is_up(fsdp2_checkpoint: SavedCheckpoint) -> None:
    def stop_one() -> None:
        begun()[0].suspend()

    stopper = threading.Thread(target=stop_one)
    stopper.start()
    started = time.monotonic()
    with pytest.raises(EnvironmentFault, match=r"fsdp=2: rank 0, 1 did not finish within 3 s and was killed"):
        load_test(str(fsdp2_checkpoint.path), ["fsdp=2"], engine="gloo", timeout=3)
    assert time.monotonic() - started < 60
    stopper.join(60)
    assert children() == []


def test_a_rank_that_dies_while_it_speaks_is_told(tmp_path: Path) -> None:
    class Dying(_Rank):
        """Says half of its result, and is no more."""

        def __init__(self, number: int) -> None:
            self.number, self.log = number, tmp_path / "log"
            self.log.write_text("no room left\n")
            code = "print('{\"rank\": 1, \"fin', end=''); raise SystemExit(7)"
            self.process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )

    with (
        Dying(1) as rank,
        pytest.raises(EnvironmentFault, match="fsdp=2: rank 1 ended with 7: no room left"),
    ):
        _collect([rank], Layout(fsdp=2), 60)


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
    code = f"""
import sys
from dcp.load import test_load
test_load({str(fsdp2_checkpoint.path)!r}, ["fsdp=2"], engine="gloo", timeout=120)
"""
    starter = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)})
    process = psutil.Process(starter.pid)

    def ranks_of() -> list[psutil.Process]:
        assert starter.poll() is None
        return [child for child in process.children() if "dcp.load.gloo_start" in child.cmdline()]

    until(lambda: len(ranks_of()) == 2)
    ranks = ranks_of()
    starter.kill()
    starter.wait()
    # Less than the ranks take to import torch.
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert not alive
    assert not list(tmp_path.glob("ckpt-gloo-*"))


@pytest.mark.parametrize("allow", [(), ("fractions.Fraction",)])
def test_both_engines_count_objects_alike(tmp_path: Path, allow: tuple[str, ...]) -> None:
    path = save({"w": torch.ones(4), "mine": Fraction(1, 3), "plain": {"n": {1, 2}}}, tmp_path / "step")
    reports = [
        load_test(path, ["fsdp=1"], engine="simulated", allow=allow),
        load_test(path, ["fsdp=1"], engine="gloo", reader="torch", allow=allow, timeout=120),
    ]
    simulated, real = (
        (layout.tensors, layout.objects, layout.objects_scanned, layout.bytes_needed, layout.ok)
        for report in reports
        for layout in report.layouts
    )
    assert simulated == real
    assert simulated[2] == len(allow)
