"""Importing: what was in the file is in the checkpoint to the bit, sharded as DTensor shards; or refused."""

import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.errors import AlreadyExistsError, CheckpointError, NotFoundError, UsageError
from dcp.layout import Layout
from dcp.save import import_torch_save
from tests.dcp.load.expectations import Sabotage, same_bits
from tests.dcp.save.saving import awkward_state, blank, flat, load, names
from tests.support.train import SavedCheckpoint


def write(state: Any, path: Path) -> str:
    torch.save(state, path)
    return str(path)


def assert_same(loaded: dict[str, Any], expected: dict[str, Any]) -> None:
    ours, theirs = flat(loaded), flat(expected)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert same_bits(ours[key], value), key
        else:
            assert ours[key] == value, key


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_in_the_file_is_in_the_checkpoint(tmp_path: Path, place: str, ranks: int) -> None:
    state = awkward_state() | {
        "ordered": OrderedDict(b=torch.ones(2), a=1),
        "more": [torch.ones(7), {"x": 1}],
    }
    report = import_torch_save(write(state, tmp_path / "in.pt"), place, ranks)
    assert (report.ok, report.ranks, report.keys) == (True, ranks, len(flat(state)))
    checked = dcp.validate(place, scrub=True)
    assert checked.ok, checked.findings
    assert not checked.findings
    assert_same(load(blank(state), place), state)
    exported = tmp_path / "out.pt"
    dcp.export(place, str(exported))
    assert_same(torch.load(exported, weights_only=True), state)


def test_chunks_are_those_of_dtensors(tmp_path: Path) -> None:
    state = {"w": torch.arange(35.0).reshape(5, 7), "few": torch.ones(2), "s": torch.tensor(1.0)}
    import_torch_save(write(state, tmp_path / "in.pt"), str(tmp_path / "step"), 4)
    layout = Layout(fsdp=4)
    for entry in dcp.read_index(str(tmp_path / "step")).tensors:
        wanted = {box.offsets: box for box in reversed(layout.boxes(entry.shape))}
        assert {chunk.box for chunk in entry.chunks} == set(wanted.values())
        for chunk in entry.chunks:
            assert chunk.record is not None
            assert layout.boxes(entry.shape)[int(chunk.record.path[2])] == chunk.box


def test_a_trained_state_comes_back(fsdp2_checkpoint: SavedCheckpoint, tmp_path: Path) -> None:
    first, again = str(tmp_path / "a.pt"), str(tmp_path / "b.pt")
    dcp.export(str(fsdp2_checkpoint.path), first)
    place = str(tmp_path / "step")
    import_torch_save(first, place, 2)
    assert dcp.diff(str(fsdp2_checkpoint.path), place, values=True).same
    dcp.export(place, again)
    assert_same(torch.load(again, weights_only=True), torch.load(first, weights_only=True))


def test_requires_grad_and_dropped_values_are_told(tmp_path: Path) -> None:
    state = {"p": torch.nn.Parameter(torch.ones(3)), "d": defaultdict(int, a=1), "empty": {}, "none": []}
    report = import_torch_save(write(state, tmp_path / "in.pt"), str(tmp_path / "step"))
    assert report.dropped == ["empty"]
    index = dcp.read_index(str(tmp_path / "step"))
    assert set(index.entries) == {"p", "d.a", "none"}


def test_a_large_strided_tensor_goes_in_pieces(tmp_path: Path) -> None:
    state = {"t": torch.arange(6_000_000, dtype=torch.int32).reshape(2000, 3000).T}
    place = str(tmp_path / "step")
    import_torch_save(write(state, tmp_path / "in.pt"), place, 3)
    assert same_bits(load({"t": torch.zeros(3000, 2000, dtype=torch.int32)}, place)["t"], state["t"])


class Unknown:
    """A class that no list knows."""


def test_unknown_classes_need_leave(tmp_path: Path) -> None:
    path, place = write({"o": Unknown(), "w": torch.ones(2)}, tmp_path / "in.pt"), str(tmp_path / "step")
    with pytest.raises(CheckpointError, match=r"Unknown.*--allow-pickle") as caught:
        import_torch_save(path, place)
    assert caught.value.code == "records.unsafe"
    assert not Path(place).exists()
    import_torch_save(path, place, allow_pickle=True)
    assert isinstance(load({"o": None}, place)["o"], Unknown)


def test_nothing_is_run(tmp_path: Path) -> None:
    path = write({"o": Sabotage(tmp_path / "ran")}, tmp_path / "in.pt")
    with pytest.raises(CheckpointError, match="mkdir"):
        import_torch_save(path, str(tmp_path / "step"))
    import_torch_save(path, str(tmp_path / "step"), allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_damage_is_found_before_anything_is_written(tmp_path: Path) -> None:
    path = Path(write({"w": torch.arange(1000.0)}, tmp_path / "in.pt"))
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        content[archive.getinfo("in/data/0").header_offset + 500] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="CRC") as caught:
        import_torch_save(str(path), str(tmp_path / "step"))
    assert caught.value.code == "records.corrupt"
    path.write_bytes(content[:-100])
    with pytest.raises(CheckpointError):
        import_torch_save(str(path), str(tmp_path / "step"))
    assert not (tmp_path / "step").exists()


def test_a_small_file_cannot_fill_a_disk(tmp_path: Path) -> None:
    path = write({"w": torch.zeros(1).expand(1 << 40)}, tmp_path / "in.pt")
    with pytest.raises(CheckpointError, match="expanded"):
        import_torch_save(path, str(tmp_path / "step"))
    small = write({"w": torch.tensor([2.0]).expand(3, 4)}, tmp_path / "small.pt")
    import_torch_save(small, str(tmp_path / "step"), 2)
    assert load({"w": torch.zeros(3, 4)}, str(tmp_path / "step"))["w"].eq(2).all()


def test_a_committed_step_is_kept(tmp_path: Path) -> None:
    place = str(tmp_path / "step")
    path = write({"w": torch.ones(2)}, tmp_path / "in.pt")
    import_torch_save(path, place, 2)
    with pytest.raises(AlreadyExistsError):
        import_torch_save(path, place)
    import_torch_save(path, place, overwrite=True)
    assert names(place) == [".metadata", "__0_0.distcp"]


def test_what_cannot_be_imported_is_said(tmp_path: Path) -> None:
    place = str(tmp_path / "step")
    with pytest.raises(UsageError, match="does not hold a dict"):
        import_torch_save(write(torch.ones(2), tmp_path / "t.pt"), place)
    with pytest.raises(UsageError, match=r"both be saved as a\.b"):
        import_torch_save(write({"a": {"b": 1}, "a.b": 2}, tmp_path / "d.pt"), place)
    with pytest.raises(UsageError, match="ranks"):
        import_torch_save(str(tmp_path / "d.pt"), place, 0)
    with pytest.raises(UsageError, match="not a local file"):
        import_torch_save("gs://bucket/x.pt", place)
    with pytest.raises(NotFoundError):
        import_torch_save(str(tmp_path / "absent.pt"), place)
    torch.save({"w": 1}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"since torch 1\.6"):
        import_torch_save(str(tmp_path / "old.pt"), place)
