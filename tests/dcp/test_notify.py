"""A notice arrives, or the training job goes on in bounded time, whatever the other end does."""

import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

import dcp
from dcp.errors import UnreachableError, UsageError
from tests.support.ranks import run_ranks
from tests.support.web import QuietHandler, served, webhook


def test_a_notice_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    with webhook() as hook:
        assert dcp.notify_committed("gs://bucket/run/step_1/", hook.http, secret="s3cret")
        monkeypatch.setenv("CKPT_NOTIFY_URL", hook.http)
        monkeypatch.setenv("CKPT_NOTIFY_SECRET", "from outside")
        assert dcp.notify_committed("gs://bucket/run/step_2")
    assert [(notice["event"], notice["url"]) for notice in hook.received] == [
        ("committed", "gs://bucket/run/step_1"),
        ("committed", "gs://bucket/run/step_2"),
    ]
    assert hook.authorizations == ["Bearer s3cret", "Bearer from outside"]


def test_it_is_sent_again_only_where_that_may_help() -> None:
    with webhook(503) as hook:
        assert dcp.notify_committed("/run/step_1", hook.http)
    assert [notice["url"] for notice in hook.received] == ["/run/step_1"]
    with webhook(401, 401) as hook:
        assert not dcp.notify_committed("/run/step_1", hook.http)
        with pytest.raises(UnreachableError, match="HTTP 401"):
            dcp.notify_committed("/run/step_1", hook.http, raise_errors=True)
    assert (len(hook.authorizations), hook.received) == (2, [])


def test_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        to = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        started = time.monotonic()
        assert not dcp.notify_committed("/run/step_1", to, timeout=1)
        assert time.monotonic() - started < 20
    assert "the watcher will find the step at its next pass" in caplog.text


def test_who_listens_and_never_answers_costs_no_more_than_the_timeout() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        started = time.monotonic()
        assert not dcp.notify_committed(
            "/run/step_1", f"http://127.0.0.1:{deaf.getsockname()[1]}/", timeout=0.5
        )
        assert time.monotonic() - started < 20


def test_who_answers_without_end_does_not_keep_the_job_from_ending() -> None:
    ended = threading.Event()

    class Endless(QuietHandler):
        def do_POST(self) -> None:
            self.send_response(202)
            self.flush_headers()
            # Every byte of the header is in time, and there is always one more.
            with suppress(OSError):
                while not ended.wait(0.1):
                    self.wfile.write(b"x")

    code = "import dcp, sys; print(dcp.notify_committed('/run/step_1', sys.argv[1], timeout=0.5))"
    with served(Endless) as place:
        try:
            command = [sys.executable, "-c", code, f"http://{place}/"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        finally:
            ended.set()
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.parametrize("to", ["", "file:///etc/passwd", "watcher:8377"])
def test_where_to_is_wrong(to: str) -> None:
    assert not dcp.notify_committed("/run/step_1", to)
    with pytest.raises(UsageError, match="CKPT_NOTIFY_URL"):
        dcp.notify_committed("/run/step_1", to, raise_errors=True)


def test_a_line_of_a_log_stays_a_line(caplog: pytest.LogCaptureFixture) -> None:
    long = "/run/step_1" + "x" * 1_000_000
    for to in ("file:///" + "x" * 1_000_000, "http://127.0.0.1:9/" + "x" * 1_000_000):
        assert not dcp.notify_committed(long, to, timeout=0.2)
    assert len(caplog.text) < 2000
    assert dcp.notify_committed.__doc__ is not None
    assert {"CKPT_NOTIFY_URL", "CKPT_NOTIFY_SECRET"} <= set(
        re.findall(r"``(\w+)``", dcp.notify_committed.__doc__)
    )


def _train(place: str, to: str) -> bool:
    """What README.md shows: a save on every rank, then a notice from one."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as torch_checkpoint

    state = {"weight": torch.full((8,), float(dist.get_rank()))}
    torch_checkpoint.save(state, storage_writer=dcp.BucketWriter(place))
    return dist.get_rank() == 0 and dcp.notify_committed(place, to)


def test_a_training_job_tells_of_its_step(tmp_path: Path) -> None:
    place = str(tmp_path / "step_1")
    with webhook() as hook:
        assert run_ranks(_train, 2, place, hook.http) == [True, False]
    assert [notice["url"] for notice in hook.received] == [place]
    assert dcp.validate(place).ok
