"""The simulated engine loads what is there, on every rank, and finds what is wrong with the rest."""

import dataclasses
import os
import pickle
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

import dcp
from dcp.boxes import Box, check_tiling
from dcp.checkpoint import open_checkpoint
from dcp.errors import NotLoadableError, UsageError
from dcp.findings import Finding
from dcp.layout import Layout
from dcp.load import test_load as load_test
from dcp.load.ranks import InertPlanner
from dcp.load.report import LayoutReport
from dcp.load.simulated import load_simulated
from dcp.tp_rules import TpRules
from tests.dcp.load.expectations import LOADABLE, Sabotage, expected_tensors, region, same_bits, save
from tests.support.golden import Golden
from tests.support.train import SavedCheckpoint

LAYOUTS = ("fsdp=2", "fsdp=3", "fsdp=2,tp=2")


class Collecting(InertPlanner):
    """Keeps a copy of every committed region, in tensor coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.committed: dict[str, list[tuple[Box, torch.Tensor]]] = defaultdict(list)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        offset = read_item.dest_index.offset
        assert offset is not None
        corner = tuple(o + d for o, d in zip(offset, read_item.dest_offsets, strict=True))
        self.committed[read_item.dest_index.fqn].append((Box(corner, tuple(tensor.shape)), tensor.clone()))


def load_collecting(
    path: Path, layout: str, memory_budget: int = 1 << 30
) -> tuple[LayoutReport, list[Collecting]]:
    """Load one layout; the report, and each rank's planner."""
    planners: list[Collecting] = []

    def make() -> Collecting:
        planners.append(Collecting())
        return planners[-1]

    [report] = load_simulated(open_checkpoint(str(path)), [Layout.parse(layout)], memory_budget, planner=make)
    return report, planners


def assert_ranks_hold(planners: list[Collecting], layout: Layout, expected: dict[str, torch.Tensor]) -> None:
    """Every rank loaded exactly its box of every tensor, with the expected bits."""
    for key, value in expected.items():
        boxes = layout.boxes(tuple(value.shape), key)
        for rank, (planner, box) in enumerate(zip(planners, boxes, strict=True)):
            got = planner.committed[key]
            assert check_tiling(box.sizes, [part.shifted(box.offsets) for part, _ in got]).ok, (key, rank)
            for part, tensor in got:
                assert same_bits(tensor, region(value, part)), (key, rank, part)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("golden", LOADABLE, ids=lambda golden: golden.name)
def test_every_rank_of_a_golden_gets_its_expected_values(golden: Golden, layout: str) -> None:
    report, planners = load_collecting(golden.directory, layout)
    assert report.ok
    assert all(found.code in ("records.unsafe", "records.unchecked") for found in report.findings)
    expected = expected_tensors(golden)
    assert_ranks_hold(planners, Layout.parse(layout), expected)
    assert sum(report.rank_bytes) >= sum(value.nbytes for value in expected.values())


@pytest.mark.parametrize("engine", ["simulated", "gloo"])
def test_quantized_weights_are_told_as_untested_and_their_damage_as_damage(
    engine: Any, golden_copy: Callable[[str], Path]
) -> None:
    step = golden_copy("torch_torchao")
    told = [("records.unchecked", "warning", f"model.{number}.weight") for number in (0, 1)]
    report = load_test(str(step), ["fsdp=2"], engine=engine)
    assert report.ok
    [layout] = report.layouts
    assert [(found.code, found.severity, found.key) for found in layout.findings] == told
    assert layout.tensors == 2
    data = bytearray((step / "__0_0.distcp").read_bytes())
    data[2000] ^= 1
    (step / "__0_0.distcp").write_bytes(data)
    [layout] = load_test(str(step), ["fsdp=2"], engine=engine).layouts
    assert not layout.ok
    assert {found.key for found in layout.findings if found.severity == "error"} == {"model.0.weight"}
    assert (told[1]) in [(found.code, found.severity, found.key) for found in layout.findings]


class Tagged(torch.Tensor):
    """A class of its own whose record is as long as that of a plain tensor."""


def test_a_subclass_of_full_size_is_told_as_untested(tmp_path: Path) -> None:
    save({"t": torch.rand(300, 40).as_subclass(Tagged), "w": torch.rand(3)}, tmp_path / "step")
    report = load_test(str(tmp_path / "step"), ["fsdp=2", "tp=3"], memory_budget=1 << 20)
    assert report.ok
    for layout in report.layouts:
        assert [(f.code, f.severity, f.key) for f in layout.findings] == [
            ("records.unchecked", "warning", "t")
        ]


@pytest.mark.parametrize("layout", ["fsdp=3", "tp=3", "fsdp=2,tp=2", "fsdp=7"])
def test_two_ranks_save_others_load(fsdp2_checkpoint: SavedCheckpoint, layout: str) -> None:
    report, planners = load_collecting(fsdp2_checkpoint.path, layout)
    assert report.ok
    assert report.findings == []
    expected = {k: v for k, v in fsdp2_checkpoint.expected().items() if isinstance(v, torch.Tensor)}
    assert len(expected) > 30
    assert_ranks_hold(planners, Layout.parse(layout), expected)
    assert report.tensors == len(expected)
    assert report.bytes_needed >= sum(value.nbytes for value in expected.values())


def test_a_budget_smaller_than_one_tensor(tmp_path: Path) -> None:
    value = torch.arange(3 * 70_001, dtype=torch.int64).reshape(3, 70_001)
    save({"w": value, "n": torch.tensor(7)}, tmp_path / "step")
    for layout in ("fsdp=2", "tp=2", "fsdp=5,tp=3"):
        report, planners = load_collecting(tmp_path / "step", layout, memory_budget=1 << 16)
        assert report.ok
        assert_ranks_hold(planners, Layout.parse(layout), {"w": value, "n": torch.tensor(7)})
        assert max(t.nbytes for planner in planners for _, t in planner.committed["w"]) <= 1 << 13


@pytest.mark.parametrize("layout", ["fsdp=3", "tp=3", "fsdp=3,tp=2"])
def test_each_byte_is_read_once(tmp_path: Path, layout: str) -> None:
    save({"a": torch.rand(3001, 301), "b": torch.rand(5, 7, 9001)}, tmp_path / "step")
    [report] = load_test(str(tmp_path / "step"), [layout], memory_budget=1 << 24).layouts
    assert report.ok
    assert report.bytes_needed == (3001 * 301 + 5 * 7 * 9001) * 4
    assert report.bytes_needed <= report.bytes_read <= 1.02 * report.bytes_needed


def test_layouts_of_one_call_share_their_reads(fsdp2_checkpoint: SavedCheckpoint) -> None:
    both = load_test(str(fsdp2_checkpoint.path), ("fsdp=2", "fsdp=3"))
    one = load_test(str(fsdp2_checkpoint.path), ("fsdp=2",))
    assert both.ok
    assert [report.ranks for report in both.layouts] == [2, 3]
    assert both.bytes_read == one.bytes_read == both.layouts[1].bytes_read


def test_a_bucket(fsdp2_checkpoint: SavedCheckpoint, gs_bucket: str) -> None:
    url = f"{gs_bucket}/run/step_2"
    fsspec.filesystem("gs").put(f"{fsdp2_checkpoint.path}/", f"{url}/", recursive=True)
    bucket, local = load_test(url), load_test(str(fsdp2_checkpoint.path))
    assert bucket.ok
    assert [r.rank_bytes for r in bucket.layouts] == [r.rank_bytes for r in local.layouts]
    assert bucket.bytes_read == local.bytes_read


@pytest.mark.slow
def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    save({"w": torch.ones(24, 1 << 20), "v": torch.ones(1 << 20, 24)}, tmp_path / "step")
    code = f"""
import resource, sys
from dcp.load import test_load
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
test_load({str(tmp_path)!r} + "/step", ["fsdp=2"], memory_budget=1 << 20)
before = peak()
report = test_load({str(tmp_path)!r} + "/step", ["fsdp=2", "tp=2"], memory_budget=32 << 20)
assert report.ok
print(peak() - before)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 40 << 10  # KiB; the tensors are 96 MiB each


# What is wrong with a checkpoint


def edit(path: Path, change: Callable[[Metadata], object]) -> None:
    """Change the index of a checkpoint that a test has saved."""
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def tensor_of(metadata: Metadata, key: str) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def errors(report: LayoutReport) -> list[Finding]:
    return [found for found in report.findings if found.severity == "error"]


def load_one(path: Path, layout: str = "fsdp=3", **options: Any) -> LayoutReport:
    [report] = load_test(str(path), [layout], **options).layouts
    return report


@pytest.mark.parametrize("size", [64, 400_000], ids=["read whole", "read in rows"])
@pytest.mark.parametrize("budget", [1 << 30, 1 << 22])
def test_a_flipped_bit_is_found(tmp_path: Path, size: int, budget: int) -> None:
    save({"good": torch.zeros(8), "hit": torch.zeros(6, size)}, tmp_path / "step")
    [data] = (tmp_path / "step").glob("*.distcp")
    content = bytearray(data.read_bytes())
    at = next(len(content) * n // 8 for n in range(4, 8) if not any(content[len(content) * n // 8 :][:64]))
    content[at] ^= 16
    data.write_bytes(content)
    report = load_one(tmp_path / "step", memory_budget=budget)
    [found] = errors(report)
    assert (found.code, found.key, found.file) == ("records.corrupt", "hit", data.name)
    assert found.detail["ranks"] == [0, 1, 2]
    assert found.detail["expected"] != found.detail["actual"]
    assert not report.ok


def test_a_missing_file_is_found_and_the_rest_is_loaded(golden_copy: Callable[[str], Path]) -> None:
    path = golden_copy("torch_fsdp_tp_2x2")
    (path / "__1_0.distcp").unlink()
    report, planners = load_collecting(path, "fsdp=2")
    [found] = errors(report)
    assert (found.code, found.file) == ("files.missing", "__1_0.distcp")
    assert not report.ok
    [golden] = [g for g in LOADABLE if g.name == "torch_fsdp_tp_2x2"]
    expected = expected_tensors(golden)
    parts = [(k, box, t) for planner in planners for k, got in planner.committed.items() for box, t in got]
    assert len(parts) > 20
    assert all(same_bits(tensor, region(expected[key], box)) for key, box, tensor in parts)


def test_a_truncated_file_is_found(golden_copy: Callable[[str], Path]) -> None:
    path = golden_copy("torch_fsdp_tp_2x2")
    data = path / "__1_0.distcp"
    before = data.stat()
    os.truncate(data, before.st_size // 2)
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    report = load_one(path)
    [found] = errors(report)
    assert (found.code, found.file) == ("files.truncated", data.name)


def test_an_object_that_vanishes_during_the_load(golden_copy: Callable[[str], Path]) -> None:
    path = golden_copy("torch_fsdp_tp_2x2")
    checkpoint = open_checkpoint(str(path))
    (path / "__1_0.distcp").unlink()
    [report] = load_simulated(checkpoint, [Layout(fsdp=2)], 1 << 30)
    assert {found.code for found in errors(report)} == {"files.missing"}
    assert all("was there when the load began" in found.message for found in errors(report))


def test_a_gap_is_found_on_the_rank_that_it_hits(golden_copy: Callable[[str], Path]) -> None:
    path = golden_copy("torch_fsdp_tp_2x2")
    key = "model.blocks.1.weight"
    lost: list[ChunkStorageMetadata] = []
    edit(path, lambda m: lost.append(tensor_of(m, key).chunks.pop()))
    report = load_one(path, "fsdp=2")
    [found] = errors(report)
    assert (found.code, found.key) == ("tiling.gap", key)
    assert found.detail["rank"] == 1
    assert found.detail["offsets"] == list(lost[0].offsets)
    assert found.detail["sizes"] == list(lost[0].sizes)


def test_an_overlap_is_found(tmp_path: Path) -> None:
    save({"w": torch.arange(12.0)}, tmp_path / "step")
    edit(
        tmp_path / "step",
        lambda m: tensor_of(m, "w").chunks.append(ChunkStorageMetadata(*[torch.Size([0])] * 2)),
    )
    edit(tmp_path / "step", lambda m: tensor_of(m, "w").chunks.append(tensor_of(m, "w").chunks[0]))
    report = load_one(tmp_path / "step", "fsdp=2")
    assert {(found.code, found.detail["rank"]) for found in errors(report)} == {
        ("tiling.overlap", 0),
        ("tiling.overlap", 1),
    }


def test_a_chunk_outside_its_tensor_is_found(tmp_path: Path) -> None:
    save({"w": torch.arange(12.0), "v": torch.ones(3)}, tmp_path / "step")
    edit(tmp_path / "step", lambda m: setattr(tensor_of(m, "w"), "size", torch.Size([8])))
    report = load_one(tmp_path / "step")
    found = {(found.code, found.key) for found in errors(report)}
    assert found == {("tiling.out-of-bounds", "w"), ("tiling.gap", "w")}
    assert report.tensors == 1


def test_absurd_sizes_cost_nothing(tmp_path: Path) -> None:
    save({"w": torch.arange(12.0), "v": torch.ones(3)}, tmp_path / "step")

    def inflate(metadata: Metadata) -> None:
        entry = tensor_of(metadata, "w")
        entry.size = torch.Size([1 << 50])
        entry.chunks[0].sizes = torch.Size([1 << 50])

    edit(tmp_path / "step", inflate)
    report = load_one(tmp_path / "step")
    assert [(found.code, found.key) for found in errors(report)] == [("records.mismatch", "w")]
    assert report.bytes_needed == 12


def test_a_record_of_another_shape_is_found(tmp_path: Path) -> None:
    save({"w": torch.arange(12.0).reshape(3, 4)}, tmp_path / "step")

    def transpose(metadata: Metadata) -> None:
        entry = tensor_of(metadata, "w")
        entry.size = torch.Size([4, 3])
        entry.chunks[0].sizes = torch.Size([4, 3])

    edit(tmp_path / "step", transpose)
    report = load_one(tmp_path / "step")
    assert [(found.code, found.key) for found in errors(report)] == [("records.mismatch", "w")]


def test_an_object_that_would_run_code_is_found_and_not_run(tmp_path: Path) -> None:
    save({"evil": Sabotage(tmp_path / "ran"), "good": {1, 2}, "t": torch.ones(2)}, tmp_path / "step")
    report = load_one(tmp_path / "step")
    [found] = errors(report)
    assert (found.code, found.key) == ("records.unsafe", "evil")
    assert any("mkdir" in name for name in found.detail["globals"])
    assert not (tmp_path / "ran").exists()
    assert (report.objects, report.objects_scanned) == (1, 0)


def test_unknown_classes_are_listed_in_a_warning(golden: Callable[[str], Path]) -> None:
    report = load_one(golden("torch_objects"))
    warned = {found.key: found.detail["globals"] for found in report.findings if found.severity == "warning"}
    assert warned["cfg"] == ["__main__.TrainCfg"]
    assert report.objects + report.objects_scanned + len(report.findings) == 34


@pytest.mark.parametrize("budget", [1 << 20, 1 << 30])
def test_what_cannot_be_decoded_within_the_budget_is_an_error(tmp_path: Path, budget: int) -> None:
    writer = torch_checkpoint.FileSystemWriter(tmp_path / "step", _extensions=[ZStandard()])
    save({"w": torch.zeros(3, 100_000)}, tmp_path / "step", storage_writer=writer)
    report = load_one(tmp_path / "step", memory_budget=budget)
    assert report.ok == (budget > 1 << 20)
    assert [found.code for found in errors(report)] == ["records.unchecked"] * (not report.ok)
    assert all("larger memory budget" in found.message for found in errors(report))


# What is wrong with a plan: the comparison must not rest on it


class Misplanned(InertPlanner):
    """Changes the first item of the plan that is for the tensor ``w``."""

    def change(self, item: ReadItem) -> list[ReadItem]:
        raise NotImplementedError

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        at = next(n for n, item in enumerate(plan.items) if item.dest_index.fqn == "w")
        return dataclasses.replace(
            plan, items=[*plan.items[:at], *self.change(plan.items[at]), *plan.items[at + 1 :]]
        )


class Forgetful(Misplanned):
    def change(self, item: ReadItem) -> list[ReadItem]:
        return []


class Shifted(Misplanned):
    def change(self, item: ReadItem) -> list[ReadItem]:
        lengths = torch.Size([item.lengths[0] - 1])
        first = dataclasses.replace(item, lengths=lengths)
        return [first, dataclasses.replace(item, dest_offsets=torch.Size(lengths), lengths=torch.Size([1]))]


class Elsewhere(InertPlanner):
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return super().resolve_tensor(read_item).clone()


@pytest.mark.parametrize(
    ("planner", "code"),
    [(Forgetful, "tiling.gap"), (Shifted, "records.mismatch"), (Elsewhere, "records.mismatch")],
)
def test_a_wrong_plan_is_found(tmp_path: Path, planner: type[InertPlanner], code: str) -> None:
    save({"w": torch.arange(12.0)}, tmp_path / "step")
    checkpoint = open_checkpoint(str(tmp_path / "step"))
    [report] = load_simulated(checkpoint, [Layout(fsdp=2)], 1 << 30, planner=planner)
    assert [(found.code, found.detail["rank"]) for found in report.findings] == [(code, 0), (code, 1)]
    assert not report.ok


# What cannot be loaded at all


def test_no_index_and_no_layouts(golden: Callable[[str], Path]) -> None:
    with pytest.raises(NotLoadableError, match=r"no \.distcp files: it is rank-wise torch\.save files"):
        load_test(str(golden("not_dcp_verl_fsdp")))
    with pytest.raises(UsageError, match="fsdp=N"):
        load_test(str(golden("torch_tied")), ["ddp=2"])
    with pytest.raises(UsageError, match="at least one"):
        load_test(str(golden("torch_tied")), [])


# Parts, rules, and classes that are allowed


def test_a_step_of_several_parts_is_loaded_part_by_part(golden_copy: Callable[[str], Path]) -> None:
    path = golden_copy("accelerate_fsdp2")
    report = load_test(str(path), ["fsdp=2", "tp=2"])
    assert report.ok
    assert [(each.part, each.layout) for each in report.layouts] == [
        (part, layout) for part in ("optimizer_0", "pytorch_model_fsdp_0") for layout in ("fsdp=2", "tp=2")
    ]
    assert report.bytes_read == sum(each.bytes_read for each in report.layouts[::2])
    data = path / "optimizer_0" / "__1_0.distcp"
    data.unlink()
    report = load_test(str(path), ["fsdp=2"])
    assert [each.ok for each in report.layouts] == [False, True]
    assert {found.file for found in report.layouts[0].findings} == {"optimizer_0/__1_0.distcp"}
    assert all(found.message.startswith("optimizer_0: ") for found in report.layouts[0].findings)


TP_RULES = {"*.w1.*": "column", "*.w2.*": "row", "*emb*": 0, "*norm*": "replicate"}


@pytest.mark.parametrize("layout", ["tp=3", "fsdp=2,tp=2", "fsdp=2,tp=3"])
def test_ruled_ranks_hold_what_the_rules_say(fsdp2_checkpoint: SavedCheckpoint, layout: str) -> None:
    ruled = Layout.parse(layout, TpRules.of(TP_RULES))
    planners: list[Collecting] = []

    def make() -> Collecting:
        planners.append(Collecting())
        return planners[-1]

    checkpoint = open_checkpoint(str(fsdp2_checkpoint.path))
    [report] = load_simulated(checkpoint, [ruled], 1 << 30, planner=make)
    assert report.ok
    assert report.findings == []
    expected = {k: v for k, v in fsdp2_checkpoint.expected().items() if isinstance(v, torch.Tensor)}
    dims = {ruled.shard_dims(tuple(v.shape), k)[-1] for k, v in expected.items()}
    assert dims == {0, 1, None}
    assert_ranks_hold(planners, ruled, expected)


def test_rules_that_fit_nothing(fsdp2_checkpoint: SavedCheckpoint, golden: Callable[[str], Path]) -> None:
    path = str(fsdp2_checkpoint.path)
    assert load_test(path, ["tp=2"], tp_rules={"*.w1.*": 0, "nope": 0}).tp_rules_idle == ["nope"]
    with pytest.raises(UsageError, match=r"no tp rule matches a tensor .* 'nope'; its keys are"):
        load_test(path, ["tp=2"], tp_rules={"nope": 0})
    with pytest.raises(UsageError, match="no layout has a tp axis"):
        load_test(path, ["fsdp=2"], tp_rules={"*": 0})
    with pytest.raises(UsageError, match="no dimension 3"):
        load_test(path, ["tp=2"], tp_rules={"*": 3})
    with pytest.raises(UsageError, match=r"fsdp=3,tp=2 cannot hold model.a.weight of 7 rows"):
        load_test(str(golden("torch_fsdp2_zstd")), ["fsdp=3,tp=2"], tp_rules={"*": "column"})


def test_allowed_classes_are_not_warned_of(golden: Callable[[str], Path]) -> None:
    url = str(golden("torch_objects"))
    [plain] = load_test(url, ["fsdp=2"]).layouts
    [allowed] = load_test(url, ["fsdp=2"], allow=["__main__.TrainCfg"]).layouts
    assert "cfg" in {found.key for found in plain.findings}
    assert "cfg" not in {found.key for found in allowed.findings}
    assert allowed.objects == plain.objects
    assert allowed.objects_scanned == plain.objects_scanned + 2


def test_data_newer_than_the_index_is_refused_as_the_reader_refuses_it(tmp_path: Path) -> None:
    path = save({"w": torch.ones(4)}, tmp_path / "step")
    [data] = path.glob("*.distcp")
    written = (path / ".metadata").stat().st_mtime
    os.utime(data, (written + 3 * 86400, written + 3 * 86400))
    report = load_test(path, ["fsdp=2"])
    [found] = report.layouts[0].findings
    assert (report.ok, found.code, found.file) == (False, "files.newer-than-metadata", data.name)
    assert "was written 3 d after .metadata" in found.message
    assert load_test(path, ["fsdp=2"], copied=True).ok


def test_what_a_caller_gave_wrong_is_said(tmp_path: Path) -> None:
    path = save({"w": torch.ones(4, 4)}, tmp_path / "step")
    remote = f"memory://{tmp_path.name}/step"
    fsspec.filesystem("memory").put(str(path), remote, recursive=True)
    for call in (load_test, dcp.forecast):
        with pytest.raises(UsageError, match="layouts is one text"):
            call(path, layouts="fsdp=2")
        with pytest.raises(UsageError, match="there is no file of tp rules at"):
            call(path, layouts=["tp=2"], tp_rules=str(tmp_path / "none.toml"))
    for given, why in (
        ({"reader": "torch"}, "needs engine gloo"),
        ({"reader": "mine"}, "not known"),
        ({"reader": "torch", "engine": "gloo"}, "local paths alone"),
    ):
        with pytest.raises(UsageError, match=why):
            load_test(remote, **given)
    [layout] = dcp.forecast(path, layouts=["tp=2"], tp_rules={"w": "row"}).layouts
    assert layout.ranks == 2


@pytest.mark.parametrize("absurd", ["length", "shape", "object"])
def test_absurd_numbers_in_an_index_are_damage_and_no_internal_error(tmp_path: Path, absurd: str) -> None:
    save({"w": torch.rand(40, 10), "v": torch.rand(40, 10), "o": [1]}, tmp_path / "step")
    index = pickle.loads((tmp_path / "step" / ".metadata").read_bytes())
    if absurd == "shape":
        entry, size = index.state_dict_metadata["w"], torch.Size((1 << 62, 1 << 62))
        entry.size, entry.chunks = size, [dataclasses.replace(entry.chunks[0], sizes=size)]
    else:
        key = "w" if absurd == "length" else "o"
        [place] = [place for place in index.storage_data if place.fqn == key]
        index.storage_data[place] = dataclasses.replace(index.storage_data[place], length=1 << 200)
    (tmp_path / "step" / ".metadata").write_bytes(pickle.dumps(index))
    report = load_test(str(tmp_path / "step"), ["fsdp=2"])
    assert not report.ok
    assert ("o" if absurd == "object" else "w") in {found.key for found in report.layouts[0].findings}
    scrubbed = dcp.validate(str(tmp_path / "step"), scrub=True)
    assert not scrubbed.ok
