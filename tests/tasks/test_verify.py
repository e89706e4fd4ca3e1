"""Verify finds every difference between a published directory and its manifest, and trusts no name in it."""

import hashlib
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.errors import CheckpointError, NotFoundError
from dcp.storage import Store, open_store
from tasks.manifest import MANIFEST, Manifest, PublishedFile, encode
from tasks.verify import BLOCK, verify
from tests.support.lifecycle import anywhere
from tests.tasks.test_aliases import manifest

CONTENT = {"report.html": b"0123456789" * 50, "model/part.json": b"x", "empty": b""}


def listed(name: str, data: bytes) -> PublishedFile:
    return PublishedFile(
        name=name,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        crc32c=google_crc32c.Checksum(data).hexdigest().decode(),
    )


def publish(store: Store, files: list[PublishedFile] | None = None) -> Manifest:
    for name, data in CONTENT.items():
        store.replace(name, data)
    files = files or [listed(n, d) for n, d in CONTENT.items()]
    made = manifest(1).model_copy(update={"files": files, "documents": [file.name for file in files]})
    store.replace(MANIFEST, encode(made))
    return made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "published"))


@pytest.mark.parametrize("kind", ["local", "memory", "gs", "s3"])
def test_what_was_published_verifies(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url = anywhere(kind, request, tmp_path)
    publish(open_store(url))
    # What a writer that was killed has left is nothing that was published.
    for name in (".partial-00000000-1-1-00000000", ".more.json.partial-00000000-1-1-00000000"):
        open_store(f"{url}/model").replace(name, b"claimed\n")
    seen: list[tuple[int, int]] = []
    for place in (url, f"{url}/{MANIFEST}"):
        report = verify(place, progress=lambda done, total: seen.append((done, total)))
        assert (report.ok, report.published, report.step, report.bytes) == (True, True, "step_1", 501)
        assert report.fingerprint == "ab" * 32
    assert seen[-1] == (501, 501)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen[: len(seen) // 2]) * 2


def problems(store: Store) -> dict[str, str]:
    report = verify(store.url)
    wrong = {file.name: str(file.problem) for file in report.files if file.problem}
    assert report.ok == (not wrong)
    return wrong


def test_each_difference_is_named(store: Store) -> None:
    publish(store)
    store.remove("report.html")
    assert problems(store) == {"report.html": "missing"}
    store.replace("report.html", CONTENT["report.html"][:-1])
    assert problems(store) == {"report.html": "size"}
    store.replace("report.html", CONTENT["report.html"] + b"x")
    assert problems(store) == {"report.html": "size"}
    store.replace("report.html", CONTENT["report.html"])
    store.replace("model/more.json", b"smuggled in")
    assert problems(store) == {"model/more.json": "extra"}


def test_a_wrong_crc_alone_is_found(store: Store) -> None:
    right = listed("model/part.json", b"x")
    others = [listed(n, d) for n, d in CONTENT.items() if n != right.name]
    publish(store, [right.model_copy(update={"crc32c": "00000000"}), *others])
    assert problems(store) == {"model/part.json": "crc32c"}


@settings(max_examples=25)
@given(position=st.integers(0, 499), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(tmp_path_factory: pytest.TempPathFactory, position: int, bit: int) -> None:
    store = open_store(str(tmp_path_factory.mktemp("flip")))
    publish(store)
    data = bytearray(CONTENT["report.html"])
    data[position] ^= 1 << bit
    store.replace("report.html", bytes(data))
    assert problems(store) == {"report.html": "sha256"}


def test_a_file_of_many_blocks_is_hashed_in_order(store: Store) -> None:
    data = bytes(range(256)) * ((2 * BLOCK + 1000) // 256)
    publish(store, [listed("report.html", data), listed("empty", b""), listed("model/part.json", b"x")])
    store.replace("report.html", data)
    assert problems(store) == {}


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../x", "", "gs://b/x", "a//b", MANIFEST])
def test_a_manifest_cannot_lead_outside(store: Store, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    publish(store, [listed(name, b"x"), *(listed(n, d) for n, d in CONTENT.items())])
    assert problems(store) == {name: "unsafe-name"}


def test_a_directory_without_manifest_is_not_published(store: Store) -> None:
    publish(store)
    store.remove(MANIFEST)
    report = verify(store.url)
    assert (report.ok, report.published, report.files) == (False, False, [])
    assert report.message == "not published: there is no manifest.json"
    publish(store.child("below"))
    assert verify(store.url).message.endswith(f", but one below it: {store.url}/below")
    with pytest.raises(NotFoundError):
        verify(f"{store.url}/nowhere")


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"schema_version": 9}'])
def test_a_damaged_manifest_is_said_to_be_one(store: Store, content: bytes) -> None:
    publish(store)
    store.replace(MANIFEST, content)
    with pytest.raises(CheckpointError, match="is no manifest"):
        verify(store.url)
