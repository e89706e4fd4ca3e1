"""Export: every golden equals its expected values, damage never becomes a file, memory stays in bounds."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Generator, Iterator
from datetime import datetime
from pathlib import Path
from threading import Event
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint

import dcp
from dcp.checkpoint import open_checkpoint
from dcp.errors import ChangedError, ForbiddenError, NotLoadableError, ResourceError, UsageError
from dcp.exporting import destination, export, plan_export
from dcp.exporting.bands import bands
from dcp.exporting.pump import Pump
from dcp.exporting.selection import repath
from dcp.records import Records
from dcp.storage import open_store
from tests.support.golden import GOLDENS, Golden
from tests.support.train import SavedCheckpoint

UNREADABLE = {"torch_hf_sharded", "torch_torchao", "torch_objects"}
EXPORTABLE = [g for g in GOLDENS if g.expected and g.name not in UNREADABLE]


def flat(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Leaves by dotted name, as torch flattens."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flat(inner, (*path, str(key)))
    elif isinstance(value, list) and any(isinstance(item, torch.Tensor | dict | list) for item in value):
        for position, inner in enumerate(value):
            yield from flat(inner, (*path, str(position)))
    else:
        yield ".".join(path), value


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        left, right = (t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for t in (a, b))
        return not left.numel() or bool(torch.equal(left.view(torch.uint8), right.view(torch.uint8)))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "getvalue"):
        return bool(a.getvalue() == b.getvalue())
    if type(a).__module__ == "numpy":
        return type(a) is type(b) and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return bool(a == b)


@pytest.mark.parametrize("golden", EXPORTABLE, ids=lambda golden: golden.name)
def test_goldens_come_out_equal(golden: Golden, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    report = export(str(golden.directory), str(out), sha256=True)
    plain = not any(f.code == "export.unsafe-object" for f in report.findings)
    if not plain:
        torch.load(out, weights_only=True)
        report = export(str(golden.directory), str(out), sha256=True, allow_pickle=True)
    assert report.ok
    assert zipfile.ZipFile(out).testzip() is None
    value = torch.load(out, weights_only=plain)
    expected: dict[str, Any] = torch.load(golden.expected, weights_only=False)
    for key, wanted in expected.items():
        place: Any = value
        for part in dcp.read_index(str(golden.directory)).path_of(key):
            place = place[part]
        assert same(wanted, place), key
    if plain:
        assert set(flat_names(torch.load(out, mmap=True, weights_only=True))) == set(flat_names(value))
    assert [f.sha256 for f in report.files] == [hashlib.sha256(out.read_bytes()).hexdigest()]
    assert report.bytes_written == out.stat().st_size == report.files[0].size


def flat_names(value: Any) -> list[str]:
    return [name for name, _ in flat(value)]


def test_it_is_nested_as_torch_itself_nests_it(golden: Callable[[str], Path], tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    for name in ("torch_fsdp_tp_2x2", "torch_keys", "torchtitan_async.step-4", "composer_sharded"):
        dcp_to_torch_save(golden(name), tmp_path / "theirs.pt")
        export(str(golden(name)), str(tmp_path / "ours.pt"))
        theirs, ours = (torch.load(tmp_path / f"{who}.pt", weights_only=False) for who in ("theirs", "ours"))
        assert same(theirs, ours)
        assert list(theirs) == list(ours)


def test_unknown_classes_are_left_out_and_named(golden: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    report = export(str(golden("torch_objects")), str(out))
    left = {f.key for f in report.findings if f.severity == "warning"}
    assert {"cfg", "enum", "fn", "partial", "dc_tensor"} <= left
    assert all(f.code == "export.unsafe-object" for f in report.findings)
    value = torch.load(out, weights_only=False)
    assert not left & set(value)
    torch.load(out, weights_only=True)
    kept = export(str(golden("torch_objects")), str(out), allow_pickle=True)
    assert not [f for f in kept.findings if f.severity == "warning"]
    assert b"TrainCfg" in zipfile.ZipFile(out).read("out/data.pkl")


def test_one_flipped_bit_makes_no_file(golden_copy: Callable[[str], Path], tmp_path: Path) -> None:
    step = golden_copy("torch_fsdp_tp_2x2")
    index = dcp.read_index(str(step))
    entry = next(e for e in index.tensors if e.key == "model.a.weight")
    record = entry.chunks[2].record
    assert record is not None
    file = step / record.path
    data = bytearray(file.read_bytes())
    data[record.offset + 704] ^= 1
    file.write_bytes(data)
    with pytest.raises(dcp.errors.RecordError) as raised:
        export(str(step), str(tmp_path / "out.pt"))
    assert raised.value.code == "records.corrupt"
    assert raised.value.key == "model.a.weight"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["torch_fsdp_tp_2x2"]
    assert export(str(step), str(tmp_path / "rest.pt"), exclude=["model.a.weight"]).ok


def test_damage_known_from_the_index_is_refused_before_reading(
    golden_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    step = golden_copy("torch_fsdp2_rank_local")
    (step / "__1.metadata").unlink()
    with pytest.raises(NotLoadableError) as raised:
        export(str(step), str(tmp_path / "out.pt"))
    assert {"tiling.gap"} == {f.code for f in raised.value.findings}
    assert not (tmp_path / "out.pt").exists()


def test_files_newer_than_the_index_are_a_warning(golden_copy: Callable[[str], Path], tmp_path: Path) -> None:
    step = golden_copy("torch_tied")
    os.utime(step / "__0_0.distcp")
    report = export(str(step), str(tmp_path / "out.pt"))
    assert [(f.code, f.severity) for f in report.findings] == [("files.newer-than-metadata", "warning")]


def test_only_damage_in_what_is_exported_counts(golden_copy: Callable[[str], Path], tmp_path: Path) -> None:
    step = golden_copy("torch_fsdp2_file_per_tensor")
    index = dcp.read_index(str(step))
    record = next(e for e in index.tensors if e.key == "model.cnt").chunks.records[0]
    assert record is not None
    (step / record.path).unlink()
    with pytest.raises(NotLoadableError):
        export(str(step), str(tmp_path / "out.pt"))
    with pytest.raises(NotLoadableError):
        export(str(step), str(tmp_path / "out.pt"), include=["model.c*"])
    assert export(str(step), str(tmp_path / "out.pt"), exclude=["model.cnt"]).ok


def test_a_change_while_reading_leaves_nothing(golden_copy: Callable[[str], Path], tmp_path: Path) -> None:
    step = golden_copy("torch_fsdp_tp_2x2")

    def touch(_done: int, _total: int) -> None:
        os.utime(step / "__0_0.distcp")

    with pytest.raises(ChangedError, match=r"__0_0\.distcp"):
        export(str(step), str(tmp_path / "out.pt"), progress=touch)
    assert not (tmp_path / "out.pt").exists()


def test_small_budgets_and_tensors_larger_than_them(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    value = {"big": torch.randn(3, 5, 200_000), "small": torch.arange(7)}
    save(value, storage_writer=FileSystemWriter(tmp_path / "c"), no_dist=True)
    with pytest.raises(ResourceError, match="at least"):
        export(str(tmp_path / "c"), str(tmp_path / "out.pt"), memory_budget=1 << 20)
    report = export(str(tmp_path / "c"), str(tmp_path / "out.pt"), memory_budget=100 << 20)
    assert same(torch.load(tmp_path / "out.pt", weights_only=True), value)
    assert report.bytes_read >= sum(t.nbytes for t in value.values())


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    tensor = torch.empty(400 << 20, dtype=torch.uint8).random_()
    save({"t": tensor}, storage_writer=FileSystemWriter(tmp_path / "c", sync_files=False), no_dist=True)
    code = (
        "import sys, dcp\n"
        "report = dcp.export(sys.argv[1], sys.argv[2], memory_budget=160 << 20)\n"
        "assert report.peak_memory < 160 << 20, report.peak_memory"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "c"), str(tmp_path / "out.pt")], check=True, timeout=120
    )
    assert torch.equal(torch.load(tmp_path / "out.pt", mmap=True)["t"], tensor)


def test_column_shards(tmp_path: Path, fsdp2_tp: SavedCheckpoint) -> None:
    export(str(fsdp2_tp.path), str(tmp_path / "out.pt"))
    value = torch.load(tmp_path / "out.pt", weights_only=True)
    index = dcp.read_index(str(fsdp2_tp.path))
    assert any(len({c.box.offsets[1:] for c in e.chunks}) > 1 for e in index.tensors), "columns are sharded"
    for key, wanted in fsdp2_tp.expected().items():
        place: Any = value
        for part in index.path_of(key):
            place = place[part]
        assert same(wanted, place), key


@pytest.fixture(scope="module")
def fsdp2_tp(tmp_path_factory: pytest.TempPathFactory) -> SavedCheckpoint:
    from tests.support.train import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("tp") / "step_1", ranks=4, tp=2)


@pytest.mark.parametrize("bucket", ["gs_bucket", "s3_bucket"])
def test_bucket_to_bucket(
    bucket: str, request: pytest.FixtureRequest, fsdp2_checkpoint: SavedCheckpoint, tmp_path: Path
) -> None:
    url = request.getfixturevalue(bucket)
    store = open_store(f"{url}/run/step_2")
    for path in fsdp2_checkpoint.path.iterdir():
        store.replace(path.name, path.read_bytes())
    report = export(store.url, f"{url}/out/model.pt")
    local = export(str(fsdp2_checkpoint.path), str(tmp_path / "model.pt"))
    assert report.files == local.files
    assert report.tensors == local.tensors
    assert open_store(f"{url}/out").read("model.pt", 1 << 30) == (tmp_path / "model.pt").read_bytes()


def test_torch_is_not_imported(golden: Callable[[str], Path], tmp_path: Path) -> None:
    code = "import sys, dcp; dcp.export(*sys.argv[1:]); assert not {'torch', 'prefect'} & set(sys.modules)"
    arguments = [str(golden("torch_fsdp_tp_2x2")), str(tmp_path / "out.pt")]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=60)


def test_selection_and_names(golden: Callable[[str], Path], tmp_path: Path) -> None:
    step, out = str(golden("torch_fsdp_tp_2x2")), str(tmp_path / "out.pt")
    export(step, out, include=["model.*"], strip_prefix="model.")
    whole = torch.load(golden("torch_fsdp_tp_2x2").with_suffix(".expected.pt"), weights_only=False)
    model = {k.removeprefix("model."): v for k, v in whole.items() if k.startswith("model.")}
    assert same(model, torch.load(out, weights_only=True))
    export(step, out, include=["model.*"], exclude=["*.bias"], rename=[r"^model\.a\.=>net.first."])
    value = torch.load(out, weights_only=True)
    assert "net.first.weight" in value
    assert not [name for name in flat_names(value) if name.endswith("bias")]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"include": ["nothing.*"]}, "matches none"),
        ({"exclude": ["*"]}, "no key is left"),
        ({"rename": ["a"]}, "=>"),
        ({"rename": ["(=>x"]}, "regular expression"),
        ({"rename": [r"(x)|.=>\2"]}, "rename"),
        ({"rename": [r"^model\..*=>same"]}, "both be called"),
        ({"strip_prefix": "model."}, "does not begin"),
        ({"dtype": "int8"}, "no type to cast to; use one of float16"),
        ({"format": "zip"}, "no format to export to; use one of torch"),
    ],
)
def test_requests_that_make_no_sense(
    options: dict[str, Any], text: str, golden: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=text):
        export(str(golden("torch_fsdp_tp_2x2")), str(tmp_path / "out.pt"), **options)
    assert not list(tmp_path.iterdir())


def test_destinations_that_make_no_sense(golden_copy: Callable[[str], Path], tmp_path: Path) -> None:
    step = golden_copy("torch_tied")
    (tmp_path / "link").symlink_to(step)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to_pipe").symlink_to(tmp_path / "pipe")
    inside = (step / "out.pt", step, tmp_path / "link" / "out.pt", tmp_path / "link")
    for dest in (*inside, tmp_path, tmp_path / "pipe", tmp_path / "to_pipe"):
        with pytest.raises(UsageError):
            export(str(step), str(dest))
    with pytest.raises(UsageError, match="lies inside"):
        export(str(tmp_path / "link"), str(step / "x.pt"))
    assert sorted(p.name for p in step.iterdir()) == [".metadata", "__0_0.distcp"]
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "to_pipe").is_symlink()


def test_plan_tells_what_the_export_takes(golden: Callable[[str], Path], tmp_path: Path) -> None:
    step, out = str(golden("torch_fsdp_tp_2x2")), str(tmp_path / "out.pt")
    plan = plan_export(step, out)
    assert not Path(out).exists()
    report = export(step, out)
    assert 0.8 < plan.bytes / report.bytes_read < 1.3 or plan.bytes < 1 << 20
    assert plan.memory > 0
    assert plan.tensors == len(report.tensors)


@pytest.mark.parametrize(
    ("path", "name", "expected"),
    [
        (("model", "a.w"), "net.a.w", ("net", "a.w")),
        (("model", "a.w"), "a.w", ("a.w",)),
        (("model", "a.w"), "model.b.w", ("model", "b.w")),
        (
            ("optim", "state", "a.w", "exp_avg"),
            "optim.state.b.w.exp_avg",
            ("optim", "state", "b.w", "exp_avg"),
        ),
        (("x", 0, "y"), "z.0.y", ("z", 0, "y")),
        (("w",), "v", ("v",)),
    ],
)
def test_renaming_keeps_the_nesting_that_is_left(
    path: tuple[str | int, ...], name: str, expected: tuple[str | int, ...]
) -> None:
    assert repath(path, name) == expected


def test_what_torch_load_refuses_by_default_is_left_out(tmp_path: Path) -> None:
    """Harmless classes too: one of them would make the whole file one that plain torch.load refuses."""
    values: dict[str, Any] = {"path": Path("a"), "when": datetime(2026, 1, 1), "some": frozenset({1})}
    values["span"] = range(3)
    values["large"] = [1 << 2100]  # of an opcode that it does not know
    torch.distributed.checkpoint.save(
        {"w": torch.ones(2), "step": 3, "o": {"nested": [1, None, "x"]}, **values},
        checkpoint_id=str(tmp_path / "step"),
        no_dist=True,
    )
    out = tmp_path / "out.pt"
    report = export(str(tmp_path / "step"), str(out))
    assert {(f.code, f.severity, f.key) for f in report.findings} == {
        ("export.unsafe-object", "warning", key) for key in values
    }
    assert torch.load(out, weights_only=True).keys() == {"w", "step", "o"}
    kept = export(str(tmp_path / "step"), str(out), allow_pickle=True)
    assert kept.findings == []
    loaded = torch.load(out, weights_only=False)
    assert {key: loaded[key] for key in values} == values
    with pytest.raises(UsageError, match="nothing is left to write: when is left out"):
        export(str(tmp_path / "step"), str(tmp_path / "none.pt"), include=["when"])
    assert not (tmp_path / "none.pt").exists()


def test_an_index_that_contradicts_itself_is_told(tmp_path: Path) -> None:
    step = tmp_path / "step"
    torch.distributed.checkpoint.save({"w": torch.ones(2), "step": 3}, checkpoint_id=str(step), no_dist=True)
    index = pickle.loads((step / ".metadata").read_bytes())
    index.planner_data["step"] = ("step", "a", "b")
    (step / ".metadata").write_bytes(pickle.dumps(index))
    report = export(str(step), str(tmp_path / "out.pt"))
    assert [(f.code, f.severity, f.key) for f in report.findings] == [
        ("metadata.unreadable", "warning", "step")
    ]
    assert export(str(step), str(tmp_path / "out.pt"), include=["w"]).findings == []
    index.planner_data["gone"] = ("gone",)
    (step / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(NotLoadableError, match="gone was saved"):
        export(str(step), str(tmp_path / "out.pt"))
    assert export(str(step), str(tmp_path / "out.pt"), include=["w"]).ok


@pytest.mark.parametrize("bucket", ["gs_bucket", "s3_bucket"])
@pytest.mark.parametrize("format", ["torch", "safetensors"])
@pytest.mark.parametrize("rewritten", [".metadata", "__9_0.distcp"])
def test_a_change_in_a_bucket_leaves_nothing(
    bucket: str, format: Any, rewritten: str, request: pytest.FixtureRequest, golden: Callable[[str], Path]
) -> None:
    url = request.getfixturevalue(bucket)
    source = golden("torch_fsdp_tp_2x2")
    store = open_store(f"{url}/run/step_2")
    for path in source.iterdir():
        store.replace(path.name, path.read_bytes())

    def change(done: int, total: int) -> None:
        if done == total:  # all has been read; the last of it has not been sent
            # The same bytes within a second are the same object to S3.
            store.replace(rewritten, b"another save's")

    with pytest.raises(ChangedError, match=re.escape(rewritten)):
        export(
            store.url, f"{url}/out/x" + (".pt" if format == "torch" else ""), format=format, progress=change
        )
    assert {info.name.partition("/")[0] for info in open_store(url).objects()} == {"run"}


@pytest.mark.parametrize("format", ["torch", "safetensors"])
def test_places_that_cannot_be_written_are_known_beforehand(
    format: Any, golden: Callable[[str], Path], tmp_path: Path
) -> None:
    step = str(golden("torch_tied"))
    (tmp_path / "file").write_bytes(b"")
    for dest, kind in (
        ("/proc/x/out", ForbiddenError),
        ("/sys/out", ForbiddenError),
        ("http://127.0.0.1:9/out", UsageError),
        (str(tmp_path / "file" / "out"), UsageError),
    ):
        for ask in (plan_export, export):
            with pytest.raises(kind):
                ask(step, dest, format=format)
    plan_export(step, str(tmp_path / "new" / "out"), format=format)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_places_are_looked_at_where_no_file_can_be_nameless(
    monkeypatch: pytest.MonkeyPatch, golden: Callable[[str], Path], tmp_path: Path
) -> None:
    monkeypatch.setattr(destination, "_NAMELESS", 0)
    step = str(golden("torch_tied"))
    plan_export(step, str(tmp_path / "new" / "out.pt"))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ForbiddenError):
        plan_export(step, "/proc/x/out.pt")


@pytest.mark.parametrize("bucket", ["gs_bucket", "s3_bucket"])
def test_a_file_in_the_place_of_a_directory_is_refused_in_buckets_too(
    bucket: str, request: pytest.FixtureRequest, golden: Callable[[str], Path]
) -> None:
    url, step = request.getfixturevalue(bucket), str(golden("torch_tied"))
    open_store(f"{url}/o").replace("x", b"")
    with pytest.raises(UsageError, match="is a directory"):
        export(step, f"{url}/o")
    assert export(step, f"{url}/o/out").ok
    assert export(step, f"{url}/o/out").ok, "a file may be replaced"


def test_a_link_is_written_through(golden: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "out.pt").symlink_to(tmp_path / "real" / "model.pt")
    for _ in range(2):
        assert export(str(golden("torch_tied")), str(tmp_path / "out.pt")).ok
        assert (tmp_path / "out.pt").is_symlink()
        assert [path.name for path in (tmp_path / "real").iterdir()] == ["model.pt"]
    torch.load(tmp_path / "out.pt")


@pytest.mark.parametrize("format", ["torch", "safetensors"])
def test_what_is_deleted_meanwhile_is_a_change(
    format: Any, golden_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    step = golden_copy("torch_fsdp_tp_2x2")

    def delete(_done: int, _total: int) -> None:
        for path in step.glob("*.distcp"):
            path.unlink()

    with pytest.raises(ChangedError, match="changed while"):
        export(str(step), str(tmp_path / "out"), format=format, memory_budget=150 << 20, progress=delete)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["torch", "safetensors"])
def test_tensors_of_other_classes_are_left_out_and_their_damage_is_found(
    format: Any, golden_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    step = golden_copy("torch_torchao")
    report = export(str(step), str(tmp_path / "out"), format=format)
    assert report.tensors.keys() == {"model.0.bias", "model.1.bias"}
    assert [(f.code, f.severity, f.key) for f in report.findings] == [
        ("export.skipped-object", "warning", f"model.{n}.weight") for n in (0, 1)
    ]
    with pytest.raises(UsageError, match="nothing is left to write"):
        export(str(step), str(tmp_path / "none"), format=format, include=["*.weight"])
    data = bytearray((step / "__0_0.distcp").read_bytes())
    data[2000] ^= 1
    (step / "__0_0.distcp").write_bytes(data)
    with pytest.raises(NotLoadableError):
        export(str(step), str(tmp_path / "bad"), format=format)
    assert not dcp.validate(str(step)).ok


def test_bands_that_nobody_takes_any_more_are_cleared_up_by_any_thread(tmp_path: Path) -> None:
    """Garbage is collected by whichever thread is at work, one that reads the bands among them."""
    torch.distributed.checkpoint.save({"w": torch.ones(64, 64)}, checkpoint_id=tmp_path / "c", no_dist=True)
    checkpoint = open_checkpoint(str(tmp_path / "c"))
    [entry] = checkpoint.index.tensors
    left, ended = Event(), Event()
    errors: list[BaseException] = []

    class Clearing(Pump):
        def _fill(self, *args: Any) -> Any:
            if args[1] is not parts[0]:
                left.wait(10)
                try:
                    running.close()
                except RuntimeError as error:
                    errors.append(error)
                ended.set()
            return super()._fill(*args)

    parts = list(bands(entry, 1024))
    pump = Clearing(Records(checkpoint.store, checkpoint.objects), band_bytes=1024, threads=1)
    running = cast("Generator[Any, None, None]", pump.run((entry, part) for part in parts))
    next(running)
    left.set()
    assert ended.wait(10)
    assert errors == []
