"""No field of a manifest can be changed unnoticed; one that was sealed anew has to agree with the files."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch

from dcp.advice import advice_for
from dcp.errors import CheckpointError
from dcp.storage import Store, open_store
from tasks.manifest import MANIFEST, Manifest, encode
from tasks.verify import VerifyReport, verify
from tests.support.lifecycle import Lifecycle

EXPORTS = """
[[runs.exports]]
name = "model.pt"
[[runs.exports]]
format = "safetensors"
name = "hf"
"""
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step that the lifecycle published, with a page beside it, and objects in it."""
    place = tmp_path_factory.mktemp("published")
    life = Lifecycle(str(place / "place"), place / "settings")
    life.save("step_1", "torch_fsdp_tp_2x2")
    [done] = life.once(life.settings(tables=EXPORTS)).steps
    assert done.published is not None
    return Path(done.published)


@pytest.fixture
def document(original: Path) -> Iterator[dict[str, Any]]:
    """The manifest's JSON; what is published is as it was afterwards."""
    before = {path: path.read_bytes() for path in original.rglob("*") if path.is_file()}
    yield json.loads(before[original / MANIFEST])
    for path, data in before.items():
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)


def _wrong(store: Store, *, deep: bool = False) -> str:
    """Why what stands there does not verify; empty if it does."""
    try:
        report = verify(store.url, deep=deep)
    except CheckpointError as error:
        return str(error)
    return "" if report.ok else _said(report)


def _said(report: VerifyReport) -> str:
    inside = [f"{wrong.name}: {wrong.message}" for wrong in report.wrong_tensors]
    files = [f"{file.name}: {file.message}" for file in report.files if file.problem]
    return "; ".join([*report.contradictions, *inside, *files])


def _mutations(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every place in a JSON document with what it is changed to; `...` takes it away."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*path, key), ...
        yield from _mutations(value, (*path, key))
    if isinstance(node, dict):
        yield (*path, "new"), "x"
    elif isinstance(node, list):
        yield path, [*node, node[0] if node else "x"]
    elif isinstance(node, str):
        yield path, f"{node}x"
        yield path, ""
    elif node is not None:
        yield path, (not node if isinstance(node, bool) else node + 1)
    if path:
        yield path, None


def _changed(document: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    made = deepcopy(document)
    at: Any = made
    for part in path[:-1]:
        at = at[part]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return made


def test_every_field(original: Path, document: dict[str, Any]) -> None:
    # In memory, since hundreds of manifests are written one over the other.
    store = open_store(f"memory://bucket-{uuid.uuid4().hex}/step")
    for path in original.rglob("*"):
        if path.is_file():
            store.replace(path.relative_to(original).as_posix(), path.read_bytes())
    assert _wrong(store, deep=True) == ""
    passed, tried = [], 0
    for path, value in _mutations(document):
        made = _changed(document, path, value)
        if made == document:
            continue
        tried += 1
        store.replace(MANIFEST, json.dumps(made).encode())
        if not _wrong(store):
            passed.append((path, value))
    assert passed == []
    assert tried > 300
    store.replace(MANIFEST, json.dumps(document, sort_keys=True).encode())
    assert _wrong(store) == "", "spelling alone is no change"


def _of(document: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(a for a in document["artifacts"] if a["name"] == name)
    return found


def _first(tensors: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(iter(tensors.values()))
    return found


RESEALED: dict[str, tuple[Change, str]] = {
    "no artifacts": (lambda d: d.update(artifacts=[]), "no artifact has the file"),
    "artifact dropped": (lambda d: d["artifacts"].pop(), "no artifact has the file hf/"),
    "artifact twice": (lambda d: d["artifacts"].append(d["artifacts"][0]), "is in 2 places"),
    "artifact without files": (lambda d: _of(d, "hf").update(files=[]), "hf has no files"),
    "file twice": (lambda d: d["files"].append(d["files"][0]), "2 times"),
    "file dropped": (lambda d: d["files"].pop(), "not as a file"),
    "no document": (lambda d: d.update(documents=[]), "no artifact has the file report.html"),
    "artifact as document": (
        lambda d: (d["artifacts"].pop(0), d["documents"].append("model.pt")),
        "a document holds tensors",
    ),
    "other SHA-256": (lambda d: _of(d, "model.pt")["files"][0].update(sha256="0" * 64), "than the list"),
    "other size": (lambda d: _of(d, "model.pt")["files"][0].update(size=1), "than the list"),
    "other bytes written": (lambda d: _of(d, "hf").update(bytes_written=1), "took 1 bytes"),
    "other place": (lambda d: _of(d, "model.pt").update(name="x.pt"), "not below the artifact"),
    "other part": (lambda d: _of(d, "model.pt").update(part="x"), "not below its part"),
    "fingerprint": (lambda d: d.update(fingerprint="0" * 64), "its fingerprint is 00000000"),
    "no fingerprint": (lambda d: d.update(fingerprint="x"), "no fingerprint"),
    "run": (lambda d: d.update(run="other"), "its run is other"),
    "step": (lambda d: d.update(step="step_2"), "its step is step_2"),
    "number": (lambda d: d.update(number=2), "its number is 2"),
    "source": (lambda d: d.update(source="/evil"), "its source is /evil"),
    "tied": (lambda d: _of(d, "model.pt").update(tied={"x": "y"}), "said to repeat"),
    "unknown format": (
        lambda d: (_of(d, "model.pt").update(format="x"), _of(d, "model.pt").update(options={})),
        "is no format",
    ),
    "format asked for": (lambda d: _of(d, "model.pt").update(format="safetensors"), "was asked for as"),
    "no frame of safetensors": (lambda d: _of(d, "hf").update(frames={}), "no digest of what is in"),
    "version 1": (lambda d: d.update(schema_version=1), "fields of version 2"),
}

DEEP: dict[str, tuple[Change, str]] = {
    "format": (lambda d: _of(d, "model.pt").update(format="safetensors", options={}), "is a torch file"),
    "tensor dropped": (lambda d: _of(d, "model.pt")["tensors"].popitem(), "does not list it"),
    "no tensors": (lambda d: _of(d, "hf").update(tensors={}), "does not list it"),
    "tensor added": (
        lambda d: _of(d, "hf")["tensors"].update(new=_first(_of(d, "hf")["tensors"])),
        "new: the files do not hold it",
    ),
    "shape": (lambda d: _first(_of(d, "hf")["tensors"]).update(shape=[1]), "expected"),
    "dtype": (lambda d: _first(_of(d, "hf")["tensors"]).update(dtype="int8"), "expected int8"),
    "digest": (lambda d: _first(_of(d, "model.pt")["tensors"]).update(digest="x"), "expected x"),
    "frame": (lambda d: _of(d, "model.pt").update(frames={"model.pt": "x"}), "expected x"),
    "no frame": (lambda d: _of(d, "model.pt").update(frames={}), "expected none"),
}


@pytest.mark.parametrize("name", RESEALED)
def test_what_contradicts_itself_with_a_seal_that_fits(
    name: str, original: Path, document: dict[str, Any]
) -> None:
    change, why = RESEALED[name]
    change(document)
    store = open_store(str(original))
    store.replace(MANIFEST, encode(Manifest.model_validate(document)))
    assert why in _wrong(store)


@pytest.mark.parametrize("name", DEEP)
def test_what_contradicts_the_files_with_a_seal_that_fits(
    name: str, original: Path, document: dict[str, Any]
) -> None:
    change, why = DEEP[name]
    change(document)
    store = open_store(str(original))
    store.replace(MANIFEST, encode(Manifest.model_validate(document)))
    assert why in _wrong(store, deep=True)


def _rewritten(original: Path, document: dict[str, Any]) -> None:
    """Another number among the objects of the file, and every size and hash of the file to match."""
    file = original / "model.pt"
    value = torch.load(file, weights_only=True)
    value["step"] = 999
    torch.save(value, file)
    data = file.read_bytes()
    forged = {
        "name": "model.pt",
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "crc32c": google_crc32c.Checksum(data).hexdigest().decode(),
    }
    _of(document, "model.pt").update(files=[forged], bytes_written=len(data))
    document["files"] = [forged if f["name"] == "model.pt" else f for f in document["files"]]


def test_objects_are_digested_too(original: Path, document: dict[str, Any]) -> None:
    _rewritten(original, document)
    store = open_store(str(original))
    store.replace(MANIFEST, encode(Manifest.model_validate(document)))
    assert _wrong(store) == ""
    assert "objects, names or types are others" in _wrong(store, deep=True)


def _as_version_1(document: dict[str, Any]) -> None:
    """What an earlier version would have written."""
    document["schema_version"] = 1
    del document["seal"], document["documents"]
    for artifact in document["artifacts"]:
        artifact.pop("inner", None)
        artifact.pop("frames", None)


def test_a_manifest_of_version_1_verifies_and_says_what_it_cannot_prove(
    original: Path, document: dict[str, Any]
) -> None:
    _as_version_1(document)
    store = open_store(str(original))
    store.replace(MANIFEST, json.dumps(document).encode())
    report = verify(store.url, deep=True)
    assert (report.ok, report.contradictions) == (True, [])
    assert [said.partition(":")[0] for said in report.unproven] == [
        "the manifest is of version 1, which has no seal",
        "model.pt",
    ]
    of_hand = {"tensors": {}, "options": {}, "bytes_read": 0}
    for artifact in document["artifacts"]:
        artifact.update(of_hand)
    store.replace(MANIFEST, json.dumps(document).encode())
    report = verify(store.url, deep=True)
    assert report.ok
    assert sum("published by hand" in said for said in report.unproven) == 2


NOT_IN_VERSION_1 = {
    "artifact as document", "no document", "version 1", "frame", "no frame", "no frame of safetensors",
    # Objects may hold tensors too, which it did not list.
    "tensor dropped",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({*RESEALED, *DEEP} - NOT_IN_VERSION_1))
def test_contradictions_of_version_1(name: str, original: Path, document: dict[str, Any]) -> None:
    change, why = (RESEALED | DEEP)[name]
    change(document)
    _as_version_1(document)
    store = open_store(str(original))
    store.replace(MANIFEST, json.dumps(document).encode())
    wrong = _wrong(store, deep=True)
    assert (why if name not in ("no tensors", "file dropped") else "not list") in wrong


@pytest.mark.usefixtures("document")
@pytest.mark.parametrize("content", [b"", b"[1", b"{}", b'{"schema_version": 9}'])
def test_a_damaged_manifest_has_a_code_of_its_own(content: bytes, original: Path) -> None:
    open_store(str(original)).replace(MANIFEST, content)
    with pytest.raises(CheckpointError, match="is no manifest") as raised:
        verify(str(original))
    assert raised.value.code == "manifest.damaged"
    assert ".metadata" not in advice_for(raised.value)
    assert "manifest.json" in advice_for(raised.value)
