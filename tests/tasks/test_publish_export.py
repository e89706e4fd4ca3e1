"""Publishing by hand: damaged files are refused, and every tensor is told by where it comes from."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dcp.errors import CheckpointError, NotLoadableError, UsageError
from dcp.exporting import export
from dcp.storage import open_store
from tasks.manifest import read_manifest
from tasks.publish import PublishReport
from tasks.publish_export import publish_export
from tasks.verify import verify
from tests.support.lifecycle import RUN, Lifecycle

STEP = "torch_fsdp_tp_2x2"


@pytest.fixture
def life(tmp_path: Path) -> Lifecycle:
    found = Lifecycle(str(tmp_path / "place"), tmp_path / "settings")
    found.save("step_1", STEP)
    return found


def publish(life: Lifecycle, made: Path) -> PublishReport:
    return publish_export(
        str(made),
        f"{life.source.url}/step_1",
        f"{life.url}/published",
        run=RUN,
        number=1,
        grace_seconds=0,
        newer_seconds=60,
        options={},
        publish_options={},
    )


def exported(life: Lifecycle, made: Path, **changes: Any) -> Path:
    export(f"{life.source.url}/step_1", str(made), **changes)
    return made


def nothing_published(life: Lifecycle) -> bool:
    return not Path(life.published.url).exists()


def said(report: PublishReport) -> dict[str, str]:
    """What is told, by severity."""
    return {found.severity: found.message for found in report.findings}


@pytest.mark.parametrize("name", ["m.pt", "m.safetensors", "hf"])
def test_an_export_is_published_with_a_certificate(name: str, life: Lifecycle, tmp_path: Path) -> None:
    changes: dict[str, Any] = {} if name.endswith(".pt") else {"format": "safetensors"}
    report = publish(life, exported(life, tmp_path / name, **changes))
    assert (report.first, report.findings) == (True, [])
    manifest = read_manifest(open_store(report.url))
    assert manifest is not None
    assert manifest.artifacts[0].tensors
    checked = verify(report.url, deep=True)
    assert (checked.ok, checked.unproven) == (True, [])
    assert checked.tensors
    assert not publish(life, tmp_path / name).first


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def _cut_last(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _text(path: Path) -> None:
    path.write_text("no tensors at all")


def _flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    tensor = torch.load(path, weights_only=True)["model"]["a.weight"].numpy().tobytes()
    data[data.index(tensor) + 3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["m.pt", "m.safetensors", "hf"])
@pytest.mark.parametrize("damage", [_cut, _cut_last, _longer, _empty, _text])
def test_a_damaged_file_is_not_published(
    name: str, damage: Callable[[Path], None], life: Lifecycle, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {} if name.endswith(".pt") else {"format": "safetensors"}
    made = exported(life, tmp_path / name, **changes)
    damage(next(made.glob("*.safetensors")) if made.is_dir() else made)
    with pytest.raises(CheckpointError):
        publish(life, made)
    assert nothing_published(life)


def test_a_flipped_bit_is_found_by_the_files_own_crc(life: Lifecycle, tmp_path: Path) -> None:
    made = exported(life, tmp_path / "m.pt")
    _flipped(made)
    with pytest.raises(CheckpointError, match=r"the CRC of .* is wrong"):
        publish(life, made)
    assert nothing_published(life)


@pytest.mark.parametrize("change", ["missing", "elsewhere", "unknown", "no map", "no JSON"])
def test_an_index_must_lead_to_every_tensor(change: str, life: Lifecycle, tmp_path: Path) -> None:
    made = exported(life, tmp_path / "hf", format="safetensors")
    index = made / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    listed = document["weight_map"]
    key = next(iter(listed))
    match change:
        case "missing":
            del listed[key]
        case "elsewhere":
            listed[key] = "other.safetensors"
        case "unknown":
            listed["new"] = listed[key]
        case "no map":
            del document["weight_map"]
    index.write_text("[" if change == "no JSON" else json.dumps(document))
    with pytest.raises(CheckpointError, match=r"index\.json"):
        publish(life, made)
    assert nothing_published(life)


def test_other_content_under_the_steps_names_is_refused(life: Lifecycle, tmp_path: Path) -> None:
    """As an export of another step would be, or one that was trained on."""
    made = exported(life, tmp_path / "m.safetensors", format="safetensors")
    tensors = load_file(made)
    tensors["model.a.weight"][0] += 1
    save_file(tensors, made)
    with pytest.raises(NotLoadableError, match="not an export of") as raised:
        publish(life, made)
    [found] = raised.value.findings
    assert (found.code, found.severity, found.detail["keys"]) == (
        "publish.foreign",
        "error",
        ["model.a.weight"],
    )
    assert nothing_published(life)


def test_what_is_the_steps_in_another_way_and_what_is_not_is_said(life: Lifecycle, tmp_path: Path) -> None:
    made = exported(life, tmp_path / "m.safetensors", format="safetensors")
    tensors = load_file(made)
    tensors["moved"] = tensors.pop("model.a.weight")
    tensors["new"] = torch.full((3,), 7.5)
    name = next(key for key, value in tensors.items() if value.dtype == torch.float32 and value.ndim == 2)
    tensors[name] = tensors[name].to(torch.bfloat16)
    save_file(tensors, made)
    report = publish(life, made)
    kinds: dict[str, list[Any]] = {found.severity: [] for found in report.findings}
    for found in report.findings:
        kinds[found.severity].append(found.detail["keys"])
    assert kinds == {
        "warning": [["new"]],
        "info": [{"moved": "model.a.weight"}, {name: "float32"}],
    }
    manifest = read_manifest(open_store(report.url))
    assert manifest is not None
    assert [found.detail["keys"] for found in manifest.warnings] == [["new"]]
    assert "publisher's word" in said(report)["warning"]
    assert verify(report.url, deep=True).ok


def test_what_torch_wrote_of_a_state_dict(life: Lifecycle, tmp_path: Path) -> None:
    """An ordered dict with a view, a transposed tensor and values beside them."""
    made = exported(life, tmp_path / "m.pt")
    weight = torch.load(made, weights_only=True)["model"]["a.weight"]
    torch.save(OrderedDict(w=weight, turned=weight.t(), pair=(weight[0], 5)), made)
    report = publish(life, made)
    manifest = read_manifest(open_store(report.url))
    assert manifest is not None
    [artifact] = manifest.artifacts
    assert artifact.tensors.keys() == {"w", "pair.0"}
    assert artifact.inner.keys() == {"turned"}
    assert verify(report.url, deep=True).ok


def test_a_directory_with_other_files(life: Lifecycle, tmp_path: Path) -> None:
    made = exported(life, tmp_path / "hf", format="safetensors")
    (made / "config.json").write_text("{}")
    report = publish(life, made)
    assert [(found.file, found.severity) for found in report.findings] == [("hf/config.json", "warning")]
    assert verify(report.url, deep=True).ok


def test_nothing_with_tensors_and_two_formats_are_refused(life: Lifecycle, tmp_path: Path) -> None:
    made = tmp_path / "out"
    made.mkdir()
    (made / "a.txt").write_text("a")
    (made / "b.txt").write_text("b")
    with pytest.raises(CheckpointError, match=r"no torch\.save and no safetensors file"):
        publish(life, made)
    exported(life, made / "m.pt")
    exported(life, made / "m.safetensors", format="safetensors")
    with pytest.raises(UsageError, match="publish one of the two"):
        publish(life, made)


def test_a_file_of_which_nothing_is_the_steps_is_refused(life: Lifecycle, tmp_path: Path) -> None:
    torch.save({"other": torch.full((3,), 7.5)}, tmp_path / "m.pt")
    with pytest.raises(NotLoadableError, match="not an export of"):
        publish(life, tmp_path / "m.pt")
    assert nothing_published(life)
