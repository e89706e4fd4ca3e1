"""Publishing: once, last, and only what the source still is."""

import hashlib
import io
import zipfile
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from dcp.errors import ChangedError, EnvironmentFault
from tasks.export import ExportRequest, export_step
from tasks.ledger import StepKey
from tasks.manifest import MANIFEST, Artifact, Manifest, PublishedFile, read_manifest
from tasks.publish import current_alias, publish_step, verify
from tests.support.lifecycle import RUN, Lifecycle, anywhere
from tests.tasks.test_ledger import race

KEY = StepKey("step_7", "ab" * 32)
DIRECTORY = "step_7/abababab"


def artifact(life: Lifecycle, data: bytes = b"weights") -> Artifact:
    """One exported file, written where it will be published."""
    life.published.replace(f"{DIRECTORY}/model.pt", data)
    file = PublishedFile(
        name="model.pt",
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        crc32c=google_crc32c.Checksum(data).hexdigest().decode(),
    )
    return Artifact(name="model.pt", format="torch", files=[file], bytes_written=len(data))


def publish(life: Lifecycle, artifacts: list[Artifact], listing: str, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "run": RUN,
        "number": 7,
        "key": KEY,
        "listing": listing,
        "artifacts": artifacts,
        "options": {},
        "publish_options": {},
        **changes,
    }
    return publish_step(f"{life.source.url}/step_7", f"{life.url}/published", **arguments)


@pytest.fixture(params=["local", "memory", "gs", "s3"])
def life(request: pytest.FixtureRequest, tmp_path: Path) -> Lifecycle:
    return _life(anywhere(request.param, request, tmp_path), tmp_path)


@pytest.fixture
def here(tmp_path: Path) -> Lifecycle:
    return _life(str(tmp_path / "place"), tmp_path)


def _life(url: str, tmp_path: Path) -> Lifecycle:
    life = Lifecycle(url, tmp_path / "settings")
    life.save("step_7")
    return life


def listing_of(life: Lifecycle) -> str:
    from dcp.checkpoint import survey

    return survey(f"{life.source.url}/step_7").listing_identity


def manifest_of(life: Lifecycle) -> Manifest:
    found = read_manifest(life.published.child(DIRECTORY))
    assert found is not None
    return found


def test_the_manifest_says_everything(here: Lifecycle) -> None:
    report = publish(here, [artifact(here)], listing_of(here), timings={"export": 1.5})
    assert (report.first, report.files, report.bytes) == (True, 1, 7)
    assert report.url == f"{here.url}/published/{RUN}/{DIRECTORY}"
    made = manifest_of(here)
    assert (made.run, made.step, made.number, made.fingerprint) == (RUN, "step_7", 7, KEY.fingerprint)
    assert made.source == f"{here.source.url}/step_7"
    assert [file.name for file in made.files] == ["model.pt"]
    assert made.timings == {"export": 1.5}
    import importlib.metadata

    assert made.versions["torch"] == importlib.metadata.version("torch")
    assert made.versions["ckpt-lifecycle"]
    assert verify(report.url).ok


def test_of_racing_publishers_one_publishes_and_the_others_have_nothing_to_do(life: Lifecycle) -> None:
    listing, made = listing_of(life), [artifact(life)]
    reports = race(5, lambda _: publish(life, made, listing))
    assert [report.first for report in reports].count(True) == 1
    assert len({report.url for report in reports}) == 1
    names = [o.name for o in life.published.objects()]
    assert names == ["aliases/latest/00000001.json", f"{DIRECTORY}/{MANIFEST}", f"{DIRECTORY}/model.pt"]
    before = life.published.info(f"{DIRECTORY}/{MANIFEST}").identity
    assert not publish(life, made, listing).first
    assert life.published.info(f"{DIRECTORY}/{MANIFEST}").identity == before


def test_a_source_that_changed_is_not_published(life: Lifecycle) -> None:
    listing, made = listing_of(life), [artifact(life)]
    life.cut("step_7")
    with pytest.raises(ChangedError, match="written again"):
        publish(life, made, listing)
    assert not life.published.exists(f"{DIRECTORY}/{MANIFEST}")
    assert current_alias(life.published) is None


def test_a_source_that_is_gone_is_not_published(here: Lifecycle) -> None:
    listing, made = listing_of(here), [artifact(here)]
    for info in here.source.objects():
        here.source.remove(info.name)
    (Path(here.source.url) / "step_7").rmdir()
    with pytest.raises(ChangedError, match="removed"):
        publish(here, made, listing)


def test_files_must_stand_where_they_were_exported(here: Lifecycle) -> None:
    listing, made = listing_of(here), [artifact(here)]
    here.published.replace(f"{DIRECTORY}/model.pt", b"weight")
    with pytest.raises(EnvironmentFault, match=r"model\.pt: 6 bytes are stored, 7 were written"):
        publish(here, made, listing)
    here.published.remove(f"{DIRECTORY}/model.pt")
    with pytest.raises(EnvironmentFault, match=r"does not hold the files .*: model\.pt: it is not there"):
        publish(here, made, listing)
    assert here.manifests() == []


def test_what_the_store_says_of_a_file_is_held_against_what_was_sent(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    life = _life(anywhere("gs", request, tmp_path), tmp_path)
    listing, made = listing_of(life), [artifact(life)]
    life.published.replace(f"{DIRECTORY}/model.pt", b"Weights")
    found = life.published.info(f"{DIRECTORY}/model.pt").crc32c
    with pytest.raises(EnvironmentFault, match=rf"model\.pt: .* {found}, .* {made[0].files[0].crc32c}"):
        publish(life, made, listing)
    assert read_manifest(life.published.child(DIRECTORY)) is None


def test_a_second_publisher_with_other_bytes_says_so(here: Lifecycle) -> None:
    listing = listing_of(here)
    publish(here, [artifact(here)], listing)
    other = artifact(here, b"weighty")
    with pytest.raises(EnvironmentFault, match="other content"):
        publish(here, [other], listing)
    assert not verify(f"{here.published.url}/{DIRECTORY}").ok


def test_a_place_of_other_bytes_is_not_taken(here: Lifecycle) -> None:
    listing, made = listing_of(here), [artifact(here)]
    publish(here, made, listing)
    twin = StepKey("step_7", "ab" * 4 + "cd" * 28)
    with pytest.raises(EnvironmentFault, match="other bytes"):
        publish(here, made, listing, key=twin)


def test_nothing_to_export_is_published_as_a_verdict(here: Lifecycle) -> None:
    report = publish(here, [], listing_of(here))
    assert (report.files, verify(report.url).ok) == (0, True)


@pytest.mark.parametrize("kind", ["local", "gs"])
@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
@pytest.mark.parametrize("damage", ["flipped", "renamed"])
def test_what_does_not_hold_the_checkpoints_tensors_is_not_published(
    kind: str, name: str, damage: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Not even where its size is right, and whatever its manifest would have said."""
    life = _life(anywhere(kind, request, tmp_path), tmp_path)
    store = life.published.child(DIRECTORY)
    wanted = ExportRequest(name=name, format="torch" if name.endswith(".pt") else "safetensors")
    exported = export_step(
        f"{life.source.url}/step_7", store.url, parts=(), requests=[wanted], options={}, publish_options={}
    )
    good = store.read(name, 1 << 30)
    if damage == "flipped":
        largest = max(torch_contents(good), key=len) if name.endswith(".pt") else good[-100:]
        at = good.index(largest) + len(largest) // 2
        store.replace(name, good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    else:
        store.replace(name, good.replace(b"weight", b"weighs"))
    with pytest.raises(EnvironmentFault, match=r"model\.\w+ does not hold what was exported to it: .*: |CRC"):
        publish(life, exported.artifacts, listing_of(life))
    assert read_manifest(store) is None
    store.replace(name, good)
    assert publish(life, exported.artifacts, listing_of(life)).first
    assert verify(store.url, deep=True).ok


def torch_contents(data: bytes) -> list[bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [archive.read(name) for name in archive.namelist() if "/data/" in name]
