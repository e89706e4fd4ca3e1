"""Export to safetensors: what other readers find in it, how it is split, that a failure leaves nothing."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from dcp.errors import BusyError, ChangedError, EnvironmentFault, StorageError, UsageError
from dcp.exporting import export, plan_export
from dcp.exporting.certificate import certify
from dcp.exporting.safetensors_layout import INDEX
from dcp.storage import open_store
from dcp.storage.local import LocalStore
from tests.dcp.exporting.test_export import EXPORTABLE, same
from tests.support.golden import Golden
from tests.support.train import SavedCheckpoint


def loaded(directory: Path) -> dict[str, torch.Tensor]:
    """Everything that the index names."""
    names = json.loads((directory / INDEX).read_text())["weight_map"]
    files = {file: load_file(directory / file) for file in set(names.values())}
    assert sorted(names) == sorted(key for tensors in files.values() for key in tensors)
    return {key: files[file][key] for key, file in names.items()}


@pytest.mark.parametrize("golden", EXPORTABLE, ids=lambda golden: golden.name)
def test_goldens_come_out_equal(golden: Golden, tmp_path: Path) -> None:
    options: dict[str, Any] = {"format": "safetensors", "max_shard_size": 20_000, "sha256": True}
    report = export(str(golden.directory), str(tmp_path / "out"), **options)
    found = loaded(tmp_path / "out")
    skipped = {f.key for f in report.findings if f.code == "export.skipped-object"}
    expected: dict[str, Any] = torch.load(golden.expected, weights_only=False)
    assert set(found) | skipped >= set(expected)
    for key, wanted in expected.items():
        if isinstance(wanted, torch.Tensor) and key not in skipped:
            assert same(wanted, found[key]), key
    for file in report.files:
        data = (tmp_path / file.name).read_bytes()
        assert (file.size, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    parts = [certify(str(tmp_path / f.name)) for f in report.files if f.name.endswith(".safetensors")]
    assert {key: tensor for part in parts for key, tensor in part.items()} == report.tensors
    plain = export(str(golden.directory), str(tmp_path / "out.pt"), allow_pickle=True)
    assert {key: plain.tensors[key] for key in report.tensors} == report.tensors


def test_one_file(golden: Callable[[str], Path], tmp_path: Path) -> None:
    step, out = str(golden("torch_fsdp_tp_2x2")), tmp_path / "model.safetensors"
    options: dict[str, Any] = {"format": "safetensors", "include": ["model.*"], "strip_prefix": "model."}
    report = export(step, str(out), **options)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    with safe_open(out, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "source": step, "fingerprint": report.fingerprint}
    found = load_file(out)
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in found.values())
    expected = torch.load(golden("torch_fsdp_tp_2x2").with_suffix(".expected.pt"), weights_only=False)
    assert found.keys() == {key.removeprefix("model.") for key in expected if key.startswith("model.")}
    with pytest.raises(UsageError, match="max-shard-size"):
        export(step, str(out), **options, max_shard_size=500)
    assert load_file(out).keys() == found.keys(), "the file of before stands"


def test_shards_hold_no_more_than_asked(golden: Callable[[str], Path], tmp_path: Path) -> None:
    step = str(golden("torch_fsdp_tp_2x2"))
    plan = plan_export(step, str(tmp_path / "out"), format="safetensors", max_shard_size=500)
    report = export(step, str(tmp_path / "out"), format="safetensors", max_shard_size=500)
    shards = [f for f in report.files if f.name.endswith(".safetensors")]
    assert len(shards) > 2
    assert [(f.name, f.bytes) for f in plan.files] == [(f.name, f.size) for f in report.files]
    assert [f.name for f in shards] == [
        f"out/model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)
    ]
    for shard in shards:
        tensors = load_file(tmp_path / shard.name)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 500
    assert report.files[-1].name == f"out/{INDEX}"
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in loaded(tmp_path / "out").values())


def test_what_it_cannot_hold_is_said(golden: Callable[[str], Path], tmp_path: Path) -> None:
    report = export(str(golden("torch_objects")), str(tmp_path / "out"), format="safetensors")
    assert {f.code for f in report.findings} == {"export.skipped-object"}
    assert {f.severity for f in report.findings} == {"warning"}
    assert not {f.key for f in report.findings} & set(loaded(tmp_path / "out"))
    exotic = export(str(golden("torch_exotic_2rank")), str(tmp_path / "exotic"), format="safetensors")
    assert [f for f in exotic.findings if "complex128" in f.message]


@pytest.mark.parametrize(
    ("dest", "options", "text"),
    [
        ("out.pt", {}, "NAME.safetensors"),
        ("out", {"rename": [r"^model\..*=>same"]}, "both be called"),
        ("out", {"rename": [r"^model\.a\.weight$=>__metadata__"]}, "cannot be a name"),
        ("taken", {}, "is a file"),
        ("out", {"include": ["nothing*"]}, "matches none"),
    ],
)
def test_requests_that_make_no_sense(
    dest: str, options: dict[str, Any], text: str, golden: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "taken").write_bytes(b"x")
    with pytest.raises(UsageError, match=text):
        export(str(golden("torch_fsdp_tp_2x2")), str(tmp_path / dest), format="safetensors", **options)
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]
    with pytest.raises(UsageError, match="format safetensors"):
        export(str(golden("torch_fsdp_tp_2x2")), str(tmp_path / "out.safetensors"))


def files_in(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_a_failure_leaves_what_stood_before(golden_copy: Callable[[str], Path], tmp_path: Path) -> None:
    step, out = golden_copy("torch_fsdp_tp_2x2"), tmp_path / "out"
    export(str(step), str(out), format="safetensors", max_shard_size=500)
    before = files_in(out)

    def touch(_done: int, _total: int) -> None:
        os.utime(step / "__0_0.distcp")

    for dest in (out, tmp_path / "new", tmp_path / "new.safetensors"):
        size = 1 << 30 if dest.suffix else 500
        with pytest.raises(ChangedError, match=r"__0_0\.distcp"):
            export(str(step), str(dest), format="safetensors", max_shard_size=size, progress=touch)
    assert files_in(out) == before
    assert not (tmp_path / "new.safetensors").exists()
    assert not files_in(tmp_path / "new")


def test_another_export_takes_the_place_of_one(golden: Callable[[str], Path], tmp_path: Path) -> None:
    step, out = str(golden("torch_fsdp_tp_2x2")), tmp_path / "out"
    export(step, str(out), format="safetensors", max_shard_size=500)
    (out / "config.json").write_text("{}")
    report = export(step, str(out), format="safetensors", include=["model.*"])
    assert set(files_in(tmp_path)) == {f.name for f in report.files} | {"out/config.json"}
    assert loaded(out).keys() == report.tensors.keys()


class _Worn(LocalStore):
    """A disk that loses a bit of what is written to it: the last one, or one in the middle of a tensor."""

    def info(self, name: str) -> Any:
        path = self.root / name
        if path.suffix == ".safetensors" and path.exists():
            data = bytearray(path.read_bytes())
            data[self.place(data)] ^= 1
            path.write_bytes(data)
        return super().info(name)

    def place(self, data: bytes) -> int:
        return -1


class _WornInside(_Worn):
    """Its user is told of the checksum, as buckets tell it."""

    def info(self, name: str) -> Any:
        told = super().info(name)
        return replace(told, crc32c=f"{google_crc32c.value((self.root / name).read_bytes()):08x}")

    def place(self, data: bytes) -> int:
        begins = 8 + int.from_bytes(data[:8], "little")
        spans = [entry["data_offsets"] for entry in json.loads(data[8:begins]).values() if "shape" in entry]
        start, end = max(spans, key=lambda span: span[1] - span[0])
        return int(begins + (start + end) // 2)


@pytest.mark.parametrize("worn", [_Worn, _WornInside])
def test_what_was_written_is_looked_at_again(
    worn: type[_Worn], golden: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "dcp.exporting.destination.open_parent", lambda dest: (worn(str(tmp_path), {}), Path(dest).name)
    )
    for dest in ("out", "out.safetensors"):
        with pytest.raises(EnvironmentFault, match="does not hold what was written"):
            export(str(golden("torch_tied")), str(tmp_path / dest), format="safetensors")
    assert not files_in(tmp_path)


@pytest.mark.parametrize("bucket", ["gs_bucket", "s3_bucket"])
def test_bucket_to_bucket(
    bucket: str, request: pytest.FixtureRequest, fsdp2_checkpoint: SavedCheckpoint, tmp_path: Path
) -> None:
    url = request.getfixturevalue(bucket)
    source = open_store(f"{url}/run/step_2")
    for path in fsdp2_checkpoint.path.iterdir():
        source.replace(path.name, path.read_bytes())
    options: dict[str, Any] = {"format": "safetensors", "max_shard_size": 100_000}
    report = export(source.url, f"{url}/out/model", **options)
    target = open_store(f"{url}/out")
    assert {f"{info.name}": info.size for info in target.objects()} == {f.name: f.size for f in report.files}
    for info in target.objects():
        (tmp_path / info.name).parent.mkdir(exist_ok=True)
        (tmp_path / info.name).write_bytes(target.read(info.name, 1 << 30))
    assert all(same(fsdp2_checkpoint.expected()[k], v) for k, v in loaded(tmp_path / "model").items())

    def fail(done: int, total: int) -> None:
        if done == total:
            raise StorageError("the network is gone")

    with pytest.raises(StorageError, match="gone"):
        export(source.url, f"{url}/failed/model", **options, progress=fail)
    assert not [info for info in open_store(url).objects() if info.name.startswith("failed")]
    with pytest.raises(StorageError, match="gone"):
        export(source.url, f"{url}/out/model", **options, progress=fail)
    assert {f"{info.name}": info.size for info in target.objects()} == {f.name: f.size for f in report.files}


def test_torch_is_not_imported(golden: Callable[[str], Path], tmp_path: Path) -> None:
    code = (
        "import sys, dcp; dcp.export(*sys.argv[1:], format='safetensors')\n"
        "assert not {'torch', 'prefect'} & set(sys.modules)"
    )
    arguments = [str(golden("torch_fsdp_tp_2x2")), str(tmp_path / "out")]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=60)


CONFIG = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def _train_llama(directory: Path) -> None:
    """A step of FSDP2 training of a tiny Llama with random weights, saved; its logits beside it."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    tokens = torch.arange(24).reshape(2, 12)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments}
    save(state, storage_writer=FileSystemWriter(directory / "step_1"))
    if dist.get_rank() == 0:
        torch.save((tokens, logits), directory / "logits.pt")


@pytest.mark.slow
def test_transformers_loads_it(tmp_path: Path) -> None:
    import transformers

    from tests.support.ranks import run_ranks

    run_ranks(_train_llama, 2, tmp_path)
    out = tmp_path / "model"
    report = export(
        str(tmp_path / "step_1"),
        str(out),
        format="safetensors",
        include=["model.*"],
        strip_prefix="model.",
        max_shard_size=20_000,
    )
    assert len(report.files) > 3
    transformers.LlamaConfig(**CONFIG).save_pretrained(out)
    model, info = transformers.LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    tokens, logits = torch.load(tmp_path / "logits.pt", weights_only=True)
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=tokens).logits, logits)


def test_two_at_once_into_one_directory(golden: Callable[[str], Path], tmp_path: Path) -> None:
    """The one that came first wins; the other is told, and breaks nothing."""
    step, dest = str(golden("torch_fsdp_tp_2x2")), str(tmp_path / "hf")
    refused: list[BusyError] = []

    def another(_done: int, _total: int) -> None:
        if not refused:
            with pytest.raises(BusyError, match="somebody else is writing to") as raised:
                export(step, dest, format="safetensors", max_shard_size=4096)
            refused.append(raised.value)

    report = export(step, dest, format="safetensors", max_shard_size=2048, progress=another)
    assert refused
    assert refused[0].exit_code == 3
    assert {f"hf/{path.name}" for path in (tmp_path / "hf").iterdir()} == {file.name for file in report.files}
    assert export(step, dest, format="safetensors").ok, "and nothing stays locked"


def test_a_model_in_one_file_is_not_left_beside_shards(golden: Callable[[str], Path], tmp_path: Path) -> None:
    """Loaders would go on taking the older one."""
    step, out = str(golden("torch_fsdp_tp_2x2")), tmp_path / "hf"
    export(step, str(out / "model.safetensors"), format="safetensors")
    older = (out / "model.safetensors").read_bytes()
    for asked in (export, plan_export):
        with pytest.raises(UsageError, match=r"model\.safetensors stands there"):
            asked(step, str(out), format="safetensors", include=["model.*"])
    assert [path.read_bytes() for path in out.iterdir()] == [older]


def test_a_failure_leaves_no_empty_directory(golden_copy: Callable[[str], Path], tmp_path: Path) -> None:
    step = golden_copy("torch_fsdp_tp_2x2")

    def touch(_done: int, _total: int) -> None:
        os.utime(step / "__0_0.distcp")

    with pytest.raises(ChangedError):
        export(str(step), str(tmp_path / "hf"), format="safetensors", progress=touch)
    assert not (tmp_path / "hf").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(ChangedError):
        export(str(step), str(tmp_path / "mine"), format="safetensors", progress=touch)
    assert (tmp_path / "mine").is_dir(), "one that was there before stays"
