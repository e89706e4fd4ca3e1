"""Claims on a prefix of a bucket: one writer at a time, and those of the dead count for nothing."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from dcp.errors import BusyError, ForbiddenError
from dcp.storage import ObjectInfo, Store, claims, open_store
from dcp.storage.gcs import GcsStore
from dcp.storage.uploads import mark

ELSEWHERE = ".partial-00000000-1-1-00000000"
"""What a process of another machine would write."""
CLOCK = 1.1
"""Seconds after which any store tells another time: S3 knows whole seconds only."""


@pytest.fixture(params=["gs", "s3"])
def store(request: pytest.FixtureRequest) -> Store:
    return open_store(f"{request.getfixturevalue(f'{request.param}_bucket')}/a/b")


def standing(store: Store) -> list[str]:
    return [name for name, _ in store.child("c").unfinished()]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "claim"]


def test_one_at_a_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_PATIENCE", 0.3)
    with store.claimed("c") as held:
        assert len(standing(store)) == 1
        with pytest.raises(BusyError, match="somebody else is writing to") as raised, store.claimed("c"):
            pass
        assert raised.value.exit_code == 3
        assert len(standing(store)) == 1, "who is refused leaves no claim"
        with store.claimed("d"), store.child("c").claimed("e"):
            held()
    assert standing(store) == []
    assert threads() == []
    with pytest.raises(RuntimeError), store.claimed("c"):
        raise RuntimeError("the work failed")
    assert standing(store) == []
    with store.claimed("c"):
        pass


def test_listings_do_not_show_it(store: Store) -> None:
    store.child("c").replace("file", b"x")
    with store.claimed("c"):
        assert [info.name for info in store.objects()] == ["c/file"]


def test_uploads_are_no_claims(store: Store) -> None:
    store.child("c").replace(f".file{ELSEWHERE}", b"an upload's identity")
    with store.claimed("c"):
        assert len(standing(store)) == 2
    assert standing(store) == [f".file{ELSEWHERE}"]
    store.child("c").replace(mark(), b"claimed\n")
    store.child("c").sweep()
    assert standing(store) == [f".file{ELSEWHERE}"], (
        "what another machine's writer has begun a moment ago stays"
    )


def test_of_many_at_once_at_most_one_goes_on(store: Store) -> None:
    inside = threading.Semaphore(1)
    together, ended = [], []
    begin = threading.Barrier(4)

    def work() -> None:
        begin.wait()
        for _ in range(3):
            with suppress(BusyError), store.claimed("c"):
                if not inside.acquire(blocking=False):
                    together.append(True)
                    continue
                time.sleep(0.05)
                inside.release()
        ended.append(True)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not together
    assert len(ended) == 4
    assert standing(store) == []


def test_a_directory_that_comes_and_goes(tmp_path: Path) -> None:
    """It is made and removed by who has it, and never under somebody's feet."""
    store, inside = open_store(str(tmp_path)), threading.Semaphore(1)
    wrong: list[str] = []
    had: list[int] = []

    def work(number: int) -> None:
        for _ in range(400):
            with suppress(BusyError), store.claimed("c"):
                if not inside.acquire(blocking=False):
                    wrong.append("two have it")
                    continue
                time.sleep(0.0002)
                if not (tmp_path / "c").is_dir():
                    wrong.append("it is gone")
                had.append(number)
                inside.release()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
    assert had


_HOLDER = """
import sys
from dcp.storage import open_store
with open_store(sys.argv[1]).claimed("c"):
    print("claimed", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(store: Store) -> Iterator["subprocess.Popen[bytes]"]:
    """Another process that has the prefix."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, store.url],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"claimed\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_one_of_a_dead_process_is_free_at_once(
    store: Store, holder: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_PATIENCE", 0.3)
    with pytest.raises(BusyError), store.claimed("c"):
        pass
    holder.kill()
    holder.wait()
    assert len(standing(store)) == 1
    with store.claimed("c"):
        assert len(standing(store)) == 1
    assert standing(store) == []


def test_one_of_another_machine_is_free_when_it_is_old(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.child("c").replace(ELSEWHERE, b"claimed\n")
    with pytest.raises(BusyError), store.claimed("c"):
        pass
    assert standing(store) == [ELSEWHERE]
    monkeypatch.setattr(claims, "EXPIRY", 0.5)
    time.sleep(CLOCK)
    with store.claimed("c"):
        assert ELSEWHERE not in standing(store)


def test_it_is_renewed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "BEAT", 0.05)
    with store.claimed("c") as held:
        [(_, first)] = store.child("c").unfinished()
        deadline = time.monotonic() + 60
        while dict(store.child("c").unfinished()).popitem()[1] == first and time.monotonic() < deadline:
            time.sleep(0.05)
        assert dict(store.child("c").unfinished()).popitem()[1] != first
        held()
    assert standing(store) == []


def test_who_was_silent_for_long_learns_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with store.claimed("c") as held:
        held()
        monkeypatch.setattr(claims, "EXPIRY", 0.5)
        time.sleep(CLOCK)
        with pytest.raises(BusyError, match="may have taken over"):
            held()
        with pytest.raises(BusyError):
            held()
    monkeypatch.undo()
    with store.claimed("c") as held:
        [name] = standing(store)
        store.child("c").remove(name)
        with pytest.raises(BusyError, match="may have taken over"):
            held()
    assert standing(store) == []


class _Guarded(GcsStore):
    """A bucket whose policy allows to write, and not what is in ``refused``."""

    refused = frozenset({"unfinished", "remove"})

    def _refuse(self, verb: str) -> None:
        if verb in self.refused:
            raise ForbiddenError(f"no permission to {verb}", self.url)

    def unfinished(self) -> Iterator[tuple[str, float | None]]:
        self._refuse("unfinished")
        return super().unfinished()

    def remove(self, name: str) -> None:
        self._refuse("remove")
        super().remove(name)

    def info(self, name: str) -> ObjectInfo:
        self._refuse("info")
        return super().info(name)


@pytest.mark.parametrize("refused", [{"unfinished"}, {"remove"}, {"info"}, {"unfinished", "remove", "info"}])
def test_with_few_rights(refused: set[str], gs_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Guarded, "refused", frozenset(refused))
    inside = _Guarded(f"{gs_bucket}/c", {})
    # One whose writer is dead.
    inside.replace(mark(), b"claimed\n")
    with claims.claim(inside) as held:
        held()
    if "unfinished" not in refused:
        # One that may not be removed does not hide those that live.
        inside.replace(ELSEWHERE, b"claimed\n")
        with pytest.raises(BusyError), claims.claim(inside):
            pass
    assert threads() == []


def test_what_it_costs(gs_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dcp.storage.http import HttpClient

    asked: list[str] = []
    call = HttpClient.call

    def counted(self: HttpClient, method: str, path: str, *arguments: object, **options: object) -> object:
        asked.append(method)
        return call(self, method, path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(claims, "BEAT", 3600.0)
    store = open_store(gs_bucket)
    with ExitStack() as claimed:
        monkeypatch.setattr(HttpClient, "call", counted)
        held = claimed.enter_context(store.claimed("c"))
        assert asked == ["POST", "GET"]
        held()
        assert asked[2:] == ["GET", "POST", "GET"]
    assert asked[5:] == ["DELETE"]
