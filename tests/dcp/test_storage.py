"""One conformance suite for every kind of store, against real servers, and the faults to be told apart."""

from __future__ import annotations

import multiprocessing
import os
import ssl
import threading
import time
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.errors import (
    AlreadyExistsError,
    CheckpointError,
    ForbiddenError,
    NotFoundError,
    OutOfSpaceError,
    UnreachableError,
    UsageError,
)
from dcp.storage import (
    ByteRange,
    Store,
    coalesce,
    fetch,
    fetch_by,
    is_safe_name,
    join_url,
    normalise_url,
    open_store,
)
from dcp.storage.faults import translate
from dcp.storage.urls import split_url

BACKENDS = ("local", "memory", "gs", "s3")


@pytest.fixture(params=BACKENDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    match request.param:
        case "local":
            return open_store(str(tmp_path / "root"))
        case "memory":
            return open_store(f"memory://bucket-{uuid.uuid4().hex}/root")
        case "gs":
            return open_store(request.getfixturevalue("gs_bucket") + "/root")
    return open_store(request.getfixturevalue("s3_bucket") + "/root")


def test_what_is_written_is_listed_and_read(store: Store) -> None:
    store.replace("run/step_1/.metadata", b"index")
    store.replace("run/step_1/__0_0.distcp", b"0123456789")
    store.replace("run/other", b"x")
    assert [(o.name, o.size) for o in store.objects()] == [
        ("run/other", 1),
        ("run/step_1/.metadata", 5),
        ("run/step_1/__0_0.distcp", 10),
    ]
    step = store.child("run").child("step_1")
    assert [o.name for o in step.objects()] == [".metadata", "__0_0.distcp"]
    assert store.child("run").directories() == ["step_1"]
    assert step.read_range("__0_0.distcp", 2, 5) == b"234"
    assert step.read_range("__0_0.distcp", 5, 5) == b""
    assert step.read(".metadata", 100) == b"index"
    assert step.info(".metadata").size == 5
    assert step.exists(".metadata")
    assert not step.exists("nothing")


def test_listings_see_what_others_wrote_since(store: Store) -> None:
    store.replace("a", b"1")
    assert len(store.objects()) == 1
    first = store.info("a").identity
    again = open_store(store.url)
    again.replace("b", b"2")
    again.replace("a", b"22")
    assert [o.name for o in store.objects()] == ["a", "b"]
    assert store.info("a").identity != first
    assert store.read_range("a", 0, 2) == b"22"
    again.remove("b")
    again.remove("b")
    assert [o.name for o in store.objects()] == ["a"]


def test_reading_past_the_end_is_a_truncated_file(store: Store) -> None:
    store.replace("f", b"abc")
    for start, end in ((0, 4), (2, 10), (3, 4), (7, 9), (0, 1 << 60)):
        with pytest.raises(CheckpointError) as raised:
            store.read_range("f", start, end)
        assert raised.value.code == "files.truncated"


def test_large_objects_are_not_read_whole(store: Store) -> None:
    store.replace("f", b"abc")
    with pytest.raises(CheckpointError):
        store.read("f", 2)


def test_absence_is_not_emptiness(store: Store) -> None:
    for call in (
        store.objects,
        store.directories,
        lambda: store.info("x"),
        lambda: store.read_range("x", 0, 1),
    ):
        with pytest.raises(NotFoundError):
            call()


def test_creation_is_conditional(store: Store) -> None:
    store.create("ledger/one.json", b"first")
    with pytest.raises(AlreadyExistsError):
        store.create("ledger/one.json", b"second")
    assert store.read("ledger/one.json", 100) == b"first"
    assert [o.name for o in store.objects()] == ["ledger/one.json"]


def test_racing_writers_have_one_winner(store: Store) -> None:
    barrier = threading.Barrier(6)
    won: list[int] = []

    def race(writer: int) -> None:
        mine = open_store(store.url)
        barrier.wait()
        try:
            mine.create("race", f"{writer}".encode() * 1000)
        except AlreadyExistsError:
            return
        won.append(writer)

    threads = [threading.Thread(target=race, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.read("race", 10_000) == f"{won[0]}".encode() * 1000


def _create_from_elsewhere(url: str, value: bytes, results: multiprocessing.Queue[bytes]) -> None:
    try:
        open_store(url).create("race", value)
    except AlreadyExistsError:
        return
    results.put(value)


@pytest.mark.parametrize("backend", ["local", "gs"])
def test_racing_processes_have_one_winner(
    backend: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = str(tmp_path / "root") if backend == "local" else request.getfixturevalue("gs_bucket") + "/root"
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[bytes] = context.Queue()
    workers = [
        context.Process(target=_create_from_elsewhere, args=(url, bytes([65 + n]) * 100, results))
        for n in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert all(worker.exitcode == 0 for worker in workers)
    assert open_store(url).read("race", 1000) == results.get(timeout=5)
    assert results.empty()


def test_streams_appear_when_they_are_whole(store: Store) -> None:
    store.replace("keep", b"x")
    with store.writer("out/big.bin") as sink:
        for _ in range(3):
            sink.write(memoryview(b"z" * 1000))
        assert [o.name for o in store.objects()] == ["keep"]
    assert store.read("out/big.bin", 10_000) == b"z" * 3000


def test_buffers_are_filled_one_after_another(store: Store) -> None:
    store.replace("f", bytes(range(200)))
    first, second = bytearray(50), bytearray(30)
    store.read_into("f", 10, [memoryview(first), memoryview(second), memoryview(bytearray())])
    assert first + second == bytes(range(10, 90))
    store.read_into("f", 10, [])
    for start in (150, 400):
        with pytest.raises(CheckpointError) as raised:
            store.read_into("f", start, [memoryview(first), memoryview(second)])
        assert raised.value.code == "files.truncated"


def test_a_checksum_that_a_store_tells_is_right(store: Store) -> None:
    store.replace("a", b"123456789")
    with store.writer("b") as sink:
        sink.write(b"12345")
        sink.write(b"6789")
    with store.writer("empty"):
        pass
    told = {info.name: info.crc32c for info in store.objects()}
    for name, expected in (("a", "e3069283"), ("b", "e3069283"), ("empty", "00000000")):
        assert told[name] == store.info(name).crc32c
        assert told[name] in (None, expected)


def test_sweeping_leaves_what_is_finished_or_under_way(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp.storage.uploads.PART", 5 << 20)
    monkeypatch.setattr("dcp.storage.uploads.WHOLE", 1)
    store.sweep()
    store.replace("d/keep", b"x")
    data = os.urandom(1 << 20) * 16
    with store.writer("d/big") as sink:
        sink.write(data)
        store.child("d").sweep()
        with store.writer("d/big") as other:
            other.write(b"another writer")
        sink.write(data[:100])
    assert [o.name for o in store.objects()] == ["d/big", "d/keep"]
    assert store.read("d/big", 1 << 30) == data + data[:100]


class Interrupted(Exception):
    pass


def write_and_fail(store: Store, name: str, *parts: bytes) -> None:
    with store.writer(name) as sink:
        for part in parts:
            sink.write(part)
        raise Interrupted


def test_streams_that_fail_leave_nothing(store: Store) -> None:
    store.replace("keep", b"x")
    for size in (10, 3 << 20):
        with pytest.raises(Interrupted):
            write_and_fail(store, "out/big.bin", b"z" * size)
    assert [o.name for o in store.objects()] == ["keep"]
    store.replace("out/big.bin", b"old")
    with pytest.raises(Interrupted):
        write_and_fail(store, "out/big.bin", b"new")
    assert store.read("out/big.bin", 100) == b"old"


@pytest.mark.parametrize("backend", ["gs", "s3"])
def test_an_upload_of_many_blocks_that_fails_leaves_nothing(
    backend: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dcp.storage.uploads.PART", 6 << 20)
    monkeypatch.setattr("dcp.storage.uploads.WHOLE", 1)
    store = open_store(request.getfixturevalue(f"{backend}_bucket") + "/root")
    store.replace("keep", b"x")
    with pytest.raises(Interrupted):
        write_and_fail(store, "big", *[b"z" * (6 << 20)] * 3)
    assert [o.name for o in store.objects()] == ["keep"]
    with store.writer("big") as sink:
        for n in range(3):
            sink.write(bytes([n]) * (6 << 20))
    assert store.info("big").size == 18 << 20
    assert store.read_range("big", (6 << 20) - 1, (6 << 20) + 1) == b"\0\1"


def test_names_do_not_lead_outside(store: Store) -> None:
    for name in ("../x", "a/../../x", "/etc/passwd"):
        for call in (
            lambda n: store.read_range(n, 0, 1),
            lambda n: store.create(n, b""),
            store.child,
            store.info,
        ):
            with pytest.raises((UsageError, NotFoundError)):
                call(name)


def test_odd_names_survive(store: Store) -> None:
    names = ["a b", "ünï", "x=1,y", "per%cent", "plus+", "dot.dot", "semi;colon", "qu'ote"]
    for name in names:
        store.create(f"d/{name}", name.encode())
    assert sorted(o.name for o in store.objects()) == sorted(f"d/{name}" for name in names)
    for name in names:
        assert store.read(f"d/{name}", 100) == name.encode()


def test_fetch_keeps_order_and_reports_the_fault(store: Store) -> None:
    store.replace("f", bytes(range(256)) * 40)
    ranges = [ByteRange("f", i, i + 7) for i in range(0, 5000, 11)]
    got = list(fetch(store, iter(ranges), threads=3, budget=64))
    assert [item for item, _ in got] == ranges
    assert all(data == bytes(n % 256 for n in range(item.start, item.end)) for item, data in got)
    with pytest.raises(CheckpointError):
        list(fetch(store, [ByteRange("f", 0, 4), ByteRange("f", 10**9, 10**9 + 1), ByteRange("f", 4, 8)]))


def test_what_nobody_takes_any_more_is_cleared_up_by_any_thread() -> None:
    """Garbage is collected by whichever thread is at work, one that reads among them."""
    left, ended = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def read(item: ByteRange) -> int:
        if item.start:
            left.wait(10)
            try:
                running.close()
            except RuntimeError as error:
                errors.append(error)
            ended.set()
        return item.start

    ranges = [ByteRange("f", start, start + 1) for start in range(20)]
    running = cast("Generator[Any, None, None]", fetch_by(read, ranges, threads=1, budget=20))
    next(running)
    left.set()
    assert ended.wait(10)
    assert errors == []


@pytest.mark.usefixtures("fake_gcs", "moto_s3")
def test_a_bucket_that_is_not_there_is_unreachable() -> None:
    for url in ("gs://no-such-bucket-here/run", "s3://no-such-bucket-here/run"):
        with pytest.raises(UnreachableError):
            open_store(url).objects()


def test_a_dead_endpoint_is_unreachable_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    # A store that only breaks off would be asked for a minute.
    monkeypatch.setattr("dcp.storage.faults._ATTEMPTS", 1000)
    monkeypatch.setattr("dcp.storage.faults._FIRST_WAIT", 0.05)
    options = {
        "endpoint_url": "http://127.0.0.1:9",
        "config_kwargs": {"retries": {"max_attempts": 1}, "connect_timeout": 1},
    }
    started = time.monotonic()
    with pytest.raises(UnreachableError) as raised:
        open_store("s3://bucket/run", **options).objects()
    assert time.monotonic() - started < 40
    assert "s3://bucket/run" in str(raised.value)


def test_no_permission_is_forbidden(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        error: BaseException = PermissionError(13, "denied")
        assert isinstance(translate(error, "x"), ForbiddenError)
        return
    (tmp_path / "closed").mkdir(mode=0o000)
    with pytest.raises(ForbiddenError):
        open_store(str(tmp_path / "closed")).objects()


def test_a_certificate_that_nobody_vouches_for_is_no_lack_of_permission() -> None:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    assert isinstance(translate(error, "gs://bucket/x"), UnreachableError)


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    import resource

    store = open_store(str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OutOfSpaceError):
            write_and_fail(store, "big", *[b"z" * (1 << 20)] * 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["gs://", "s3://", "", "memory://", "nosuch://bucket/x", "a\0b"])
def test_locations_that_make_no_sense_are_usage_errors(url: str) -> None:
    with pytest.raises(UsageError):
        open_store(url)


def test_urls_are_not_paths() -> None:
    assert normalise_url("gs://b/run/") == "gs://b/run"
    assert normalise_url("s3://b//run") == "s3://b//run"
    assert normalise_url("file:///x/y/") == "/x/y"
    assert normalise_url("rel").startswith("/")
    assert join_url("gs://b/run", "step_1", ".metadata") == "gs://b/run/step_1/.metadata"
    assert split_url("gs://b/run/step_1") == ("gs://b/run", "step_1")
    assert split_url("/x") == ("/", "x")
    with pytest.raises(UsageError):
        split_url("gs://b")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        "../x",
        "a/../b",
        "/etc/passwd",
        "a//b",
        "./a",
        "gs://b/x",
        "a\\b",
        "a\0b",
        "a\nb",
        "x" * 2000,
    ],
)
def test_unsafe_names(name: str) -> None:
    assert not is_safe_name(name)


@pytest.mark.parametrize("name", ["__0_0.distcp", "sub/dir/file", ".metadata", "..a", "a..b", "ünï"])
def test_safe_names(name: str) -> None:
    assert is_safe_name(name)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 200), st.integers(0, 40)), max_size=20),
    st.integers(0, 20),
    st.integers(1, 100),
)
def test_coalesced_ranges_hold_every_range(items: list[tuple[str, int, int]], gap: int, limit: int) -> None:
    ranges = [ByteRange(name, start, start + length) for name, start, length in items]
    joined = coalesce(ranges, gap=gap, limit=limit)
    longest = max((r.length for r in ranges), default=0)
    for item in ranges:
        assert any(j.name == item.name and j.start <= item.start and item.end <= j.end for j in joined)
    assert joined == sorted(joined)
    assert all(j.length <= max(limit, longest) for j in joined)


def test_links_that_lead_nowhere_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    assert [o.name for o in open_store(str(tmp_path)).objects()] == ["real"]


def test_a_file_given_for_a_directory_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(NotFoundError, match="is a file, not a directory"):
        open_store(str(tmp_path / "file")).objects()


def test_a_user_that_does_not_exist_has_no_home() -> None:
    with pytest.raises(UsageError, match=r"~nosuchuser.*write \./~nosuchuser/x"):
        open_store("~nosuchuser/x")
