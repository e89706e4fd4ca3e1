"""Uploads in parts, and reads, over links that fail: real servers behind a proxy that damages exchanges."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.errors import DamagedUploadError, EnvironmentFault, UnreachableError, UsageError
from dcp.storage import Store, open_store
from dcp.storage.crc32c import crc32c, joined
from dcp.storage.uploads import is_abandoned, mark
from tests.support.gcs import FakeGcs
from tests.support.proxy import Fault, FaultProxy, fault_proxy
from tests.support.s3 import MotoS3

PART = 5 << 20
DATA = os.urandom(1 << 20) * 12


_REQUESTS = {
    ("gs", "part"): ("POST", "uploadType=media"),
    ("gs", "commit"): ("POST", "/compose"),
    ("gs", "read"): ("GET", "alt=media"),
    ("s3", "part"): ("PUT", "partNumber="),
    ("s3", "commit"): ("POST", "?uploadId="),
    ("s3", "read"): ("GET", "/big"),
}
"""Method and part of the target of the requests that tests damage."""


@dataclass
class Place:
    """A prefix in a bucket, reached directly and through the proxy."""

    kind: str
    store: Store
    direct: Store
    proxy: FaultProxy
    raw: Callable[[], list[str]]
    """Names of everything in the bucket, hidden or not, and of uploads that were begun."""

    def fail(self, fault: Fault, what: str, times: int | None = None) -> None:
        method, containing = _REQUESTS[self.kind, what]
        self.proxy.each(fault, method=method, containing=containing, times=times)


@pytest.fixture(params=["gs", "s3"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr("dcp.storage.uploads.PART", PART)
    monkeypatch.setattr("dcp.storage.uploads.WHOLE", 1)
    monkeypatch.setattr("dcp.storage.faults._ATTEMPTS", 3)
    monkeypatch.setattr("dcp.storage.faults._FIRST_WAIT", 0.01)
    bucket = request.getfixturevalue(f"{request.param}_bucket")
    if request.param == "gs":
        server: FakeGcs | MotoS3 = request.getfixturevalue("fake_gcs")
        raw = _raw_gcs(server, bucket)
    else:
        server = request.getfixturevalue("moto_s3")
        raw = _raw_s3(server, bucket)
    with fault_proxy(server.endpoint) as proxy:
        options: dict[str, Any] = {"endpoint_url": proxy.endpoint}
        if request.param == "s3":
            # Ours are enough here, and do not wait for up to a second each.
            options["config_kwargs"] = {"retries": {"max_attempts": 0}}
        url = f"{bucket}/root"
        yield Place(request.param, open_store(url, **options), open_store(url), proxy, raw)


def _raw_gcs(server: FakeGcs, bucket: str) -> Callable[[], list[str]]:
    def raw() -> list[str]:
        found = server._call("GET", f"/storage/v1/b/{bucket.removeprefix('gs://')}/o?maxResults=1000")
        return [item["name"] for item in found.get("items", ())]

    return raw


def _raw_s3(server: MotoS3, bucket: str) -> Callable[[], list[str]]:
    def raw() -> list[str]:
        found = server._resource().Bucket(bucket.removeprefix("s3://"))
        begun = [f"{upload.object_key} begun" for upload in found.multipart_uploads.all()]
        return [item.key for item in found.objects.all()] + begun

    return raw


def write(store: Store, name: str = "big", data: bytes = DATA, step: int = 1 << 20) -> None:
    with store.writer(name) as sink:
        for at in range(0, len(data), step):
            sink.write(data[at : at + step])


def test_an_object_in_parts_is_what_was_written(place: Place) -> None:
    write(place.store, step=700_001)
    assert place.direct.read("big", len(DATA)) == DATA
    assert place.raw() == ["root/big"]
    assert place.direct.info("big").crc32c in (None, f"{crc32c(DATA):08x}")


def test_more_parts_than_are_composed_at_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp.storage.gcs._COMPOSED", 2)
    write(place.store, data=DATA * 2)
    assert place.direct.read("big", 2 * len(DATA)) == DATA * 2
    assert place.raw() == ["root/big"]


@pytest.mark.parametrize("fault", ["503", "reset", "lost", "short"])
@pytest.mark.parametrize("what", ["part", "commit"])
def test_an_upload_outlives_faults_that_pass(place: Place, fault: Fault, what: str) -> None:
    place.fail(fault, what, times=2)
    write(place.store)
    assert place.direct.read("big", len(DATA)) == DATA
    assert place.raw() == ["root/big"]


@pytest.mark.parametrize("fault", ["503", "reset"])
@pytest.mark.parametrize("what", ["part", "commit"])
def test_an_upload_that_cannot_succeed_leaves_nothing(place: Place, fault: Fault, what: str) -> None:
    place.fail(fault, what)
    with pytest.raises(UnreachableError) as raised:
        write(place.store)
    assert f"{place.store.url}/big" in str(raised.value)
    assert raised.value.exit_code == 3
    assert place.raw() == []


def test_what_cannot_be_removed_now_is_removed_by_the_next_writer(place: Place) -> None:
    sent = 0

    def rule(_: str, target: str) -> Fault | None:
        nonlocal sent
        sent += "partNumber=" in target or "uploadType=media" in target
        return "503" if sent > 1 else None

    place.proxy.rule = rule
    with pytest.raises(UnreachableError):
        write(place.store)
    place.proxy.rule = None
    assert place.raw() != []
    with pytest.raises(FileNotFoundError):
        place.direct.objects()
    write(place.store, data=b"small")
    assert place.raw() == ["root/big"]


@pytest.mark.parametrize("fault", ["503", "reset", "short"])
def test_reads_outlive_faults_that_pass_and_end_where_they_do_not(place: Place, fault: Fault) -> None:
    place.direct.replace("big", DATA)
    place.fail(fault, "read", times=2)
    assert place.store.read_range("big", 5, 1_000_005) == DATA[5:1_000_005]
    place.fail(fault, "read", times=1)
    view = memoryview(bytearray(100))
    place.store.read_into("big", 7, [view[:50], view[50:]])
    assert view == DATA[7:107]
    place.fail(fault, "read")
    with pytest.raises(UnreachableError) as raised:
        place.store.read_range("big", 5, 1_000_005)
    assert f"{place.store.url}/big" in str(raised.value)


@pytest.mark.parametrize("size", [len(DATA), 1 << 20])
def test_bytes_damaged_on_their_way_are_not_published(place: Place, size: int) -> None:
    def rule(method: str, target: str) -> Fault | None:
        data = "partNumber=" in target or "uploadType=media" in target or target.endswith("/big")
        return "flipped" if data and method in ("PUT", "POST") else None

    place.proxy.rule = rule
    with pytest.raises(EnvironmentFault) as raised:
        write(place.store, data=DATA[:size])
    assert f"{place.store.url}/big" in str(raised.value)
    if place.kind == "gs":
        assert isinstance(raised.value, DamagedUploadError)
        assert "was sent" in str(raised.value)
    assert place.raw() == []


def test_a_creation_whose_answer_is_lost_is_not_taken_for_somebody_elses(place: Place) -> None:
    if place.kind == "s3":
        # S3 does not say whose an object is: callers settle it by looking.
        place.proxy.each("lost", method="PUT", containing="/one", times=1)
        with pytest.raises(FileExistsError):
            place.store.create("one", b"mine")
        assert place.direct.read("one", 10) == b"mine"
        return
    place.proxy.each("lost", method="POST", containing="uploadType=multipart", times=1)
    place.store.create("one", b"mine")
    with pytest.raises(FileExistsError):
        place.store.create("one", b"mine")


def test_what_s3_repeats_by_itself_is_bounded(
    s3_bucket: str, moto_s3: MotoS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dcp.storage.faults._ATTEMPTS", 1)
    open_store(s3_bucket).replace("big", b"data")
    # aiohttp repeats once what a kept connection breaks off.
    for fault, asked, most in (("503", None, 3), ("reset", None, 6), ("503", "1", 1)):
        if asked is not None:
            monkeypatch.setenv("AWS_MAX_ATTEMPTS", asked)
        with fault_proxy(moto_s3.endpoint) as proxy:
            proxy.each(fault, method="GET")  # type: ignore[arg-type]
            with pytest.raises(UnreachableError):
                open_store(s3_bucket, endpoint_url=proxy.endpoint).read_range("big", 0, 4)
            assert 1 <= len(proxy.requests) <= most, (fault, asked)


def test_a_creation_outlives_faults_that_pass(place: Place) -> None:
    method = "PUT" if place.kind == "s3" else "POST"
    place.proxy.each("503", method=method, containing="one" if place.kind == "s3" else "upload", times=2)
    place.store.create("one", b"mine")
    assert place.direct.read("one", 10) == b"mine"


_CHILD = """
import sys
from dcp.storage import open_store, uploads
uploads.PART, uploads.WHOLE = 5 << 20, 1
with open_store(sys.argv[1]).writer("big") as sink:
    for _ in range(4):
        sink.write(bytes(5 << 20))
    while uploads.THREADS:
        print(flush=True)
        sys.stdin.readline()
"""


def test_what_a_killed_writer_left_is_swept_and_what_a_living_one_writes_is_not(place: Place) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, place.direct.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        deadline = time.monotonic() + 30
        while not place.raw() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        begun = place.raw()
        assert begun
        write(place.store, data=b"small")
        place.direct.sweep()
        assert set(begun) <= set(place.raw())
        child.send_signal(signal.SIGKILL)
        child.wait(30)
        write(place.store, data=b"again")
        assert place.raw() == ["root/big"]
    finally:
        child.kill()
        child.communicate()


def test_only_the_living_are_spared() -> None:
    mine = mark()
    assert is_abandoned(f"dir/.x{mine}", None), "not under way in this process"
    dead = subprocess.run(
        [sys.executable, "-c", "from dcp.storage.uploads import mark; print(mark(), end='')"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert is_abandoned(f".x{dead}-0-00000", time.time())
    machine = mine.split("-")[1]
    foreign = mine.replace(machine, "0" * 8)
    assert not is_abandoned(f".x{foreign}", time.time() - 3600)
    assert not is_abandoned(f".x{foreign}", None)
    assert is_abandoned(f".x{foreign}", time.time() - 100_000)
    assert not is_abandoned(".x.partial-something", 0)


@given(st.lists(st.binary(max_size=70), max_size=6))
def test_checksums_join(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    assert joined((crc32c(part), len(part)) for part in parts) == (crc32c(whole), len(whole))


def test_nobody_listening_ends_within_seconds() -> None:
    started = time.monotonic()
    with pytest.raises(UnreachableError) as raised:
        open_store("gs://bucket/run", endpoint_url="http://127.0.0.1:9").objects()
    assert time.monotonic() - started < 20
    assert "gs://bucket/run" in str(raised.value)


@pytest.fixture
def checkpoint(place: Place) -> str:
    """A checkpoint of 12 MB beside the prefix that is written to."""
    import torch
    from torch.distributed.checkpoint import save

    from dcp.save import BucketWriter

    url = f"{place.direct.url}/step"
    state = {f"layer.{n}": torch.arange(1_000_000, dtype=torch.float32) + n for n in range(3)}
    with warnings.catch_warnings(action="ignore"):
        save(state, storage_writer=BucketWriter(url), no_dist=True)
    return url


def test_an_export_over_links_that_fail_is_whole_or_not_there(place: Place, checkpoint: str) -> None:
    from dcp.exporting import export

    options = dict(place.store.options)
    before = place.raw()
    place.fail("503", "part", times=1)
    report = export(checkpoint, f"{place.direct.url}/out/a.pt", dest_options=options)
    assert place.direct.info("out/a.pt").size == report.bytes_written
    assert place.raw() == sorted([*before, "root/out/a.pt"])
    place.direct.remove("out/a.pt")
    for fault, what in (("503", "part"), ("reset", "part"), ("reset", "commit")):
        place.fail(fault, what)  # type: ignore[arg-type]
        with pytest.raises(UnreachableError) as raised:
            export(checkpoint, f"{place.direct.url}/out/a.pt", dest_options=options)
        assert raised.value.exit_code == 3
        assert "out/a.pt" in str(raised.value)
        assert "\n" not in str(raised.value)
        assert place.raw() == before


def test_an_export_reads_over_links_that_fail(place: Place, checkpoint: str, tmp_path: Path) -> None:
    from dcp.exporting import export

    options = dict(place.store.options)
    rule = ("GET", "alt=media" if place.kind == "gs" else ".distcp")
    for fault in ("503", "reset", "short"):
        place.proxy.each(fault, method=rule[0], containing=rule[1], times=2)  # type: ignore[arg-type]
        assert export(checkpoint, str(tmp_path / f"{fault}.pt"), **options).ok
    place.proxy.each("short", method=rule[0], containing=rule[1])
    with pytest.raises(UnreachableError):
        export(checkpoint, str(tmp_path / "none.pt"), **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["503.pt", "reset.pt", "short.pt"]


def test_credentials_are_those_that_gcsfs_takes() -> None:
    from google.oauth2.credentials import Credentials

    from dcp.storage.gcs import GcsStore, understands

    def sent(**options: Any) -> dict[str, str]:
        assert understands(options)
        return dict(GcsStore("gs://bucket/run", options)._client._headers())

    assert sent(token=Credentials(token="abc")) == {"authorization": "Bearer abc"}  # type: ignore[no-untyped-call]
    assert sent(token="anon") == {}
    assert not understands({"session_kwargs": {}})
    with pytest.raises(UsageError, match="project"):
        open_store("gs://bucket/run", requester_pays=True, token="anon")
