"""The load planners on real gloo ranks: other layouts than were saved, sharded targets, exact resumption."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from tests.dcp.load.expectations import same_bits, save
from tests.support.ranks import run_ranks
from tests.support.train import SavedCheckpoint, Training, build_model, make_checkpoint

pytestmark = pytest.mark.slow


def reader_of(kind: str, path: str) -> Any:
    from torch.distributed.checkpoint import FileSystemReader

    return dcp.BucketReader(path) if kind == "bucket" else FileSystemReader(path)


def trainer(tp: int, seed: int) -> tuple[Any, Any, Any]:
    """Model, optimizer and mesh: FSDP2 over what tensor parallelism of ``tp`` ranks leaves."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    data_ranks = dist.get_world_size() // tp
    mesh = init_device_mesh("cpu", (data_ranks, tp), mesh_dim_names=("dp", "tp"))
    model: Any = build_model(Training(seed=seed))
    for layer in model.layers:
        if tp > 1:
            parallelize_module(layer, mesh["tp"], {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
        if data_ranks > 1:
            fully_shard(layer, mesh=mesh["dp"])
    if data_ranks > 1:
        fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False), mesh


def state_of(model: Any, optimizer: Any, **extras: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer, options=StateDictOptions(strict=True))
    return {"model": model_state, "optim": optimizer_state, **extras}


def full(state: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.tensor import DTensor

    flat, _ = flatten_state_dict(state)
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in flat.items()}


def load_on_a_rank(path: str, tp: int, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    from torch.distributed.checkpoint import load

    model, optimizer, _ = trainer(tp, seed=5)
    state = state_of(model, optimizer, step=0, rng=torch.zeros_like(torch.get_rng_state()))
    planner = dcp.StrictLoadPlanner()
    load(state, storage_reader=reader_of(kind, path), planner=planner)
    return full(state), planner.report.model_dump()


@pytest.mark.parametrize(
    ("ranks", "tp", "kind"),
    [(3, 1, "bucket"), (3, 1, "torch"), (2, 2, "bucket")],
    ids=["2 to 3, ours", "2 to 3, torch's", "FSDP2 to TP"],
)
def test_fsdp2_on_two_ranks_loads_elsewhere(
    fsdp2_checkpoint: SavedCheckpoint, ranks: int, tp: int, kind: str
) -> None:
    check(fsdp2_checkpoint, ranks, tp, kind)


def test_two_dimensions_load_as_two(fsdp2_checkpoint: SavedCheckpoint) -> None:
    check(fsdp2_checkpoint, 4, 2, "bucket")


def test_two_dimensions_load_as_one(tmp_path: Path) -> None:
    check(make_checkpoint(tmp_path / "step", ranks=4, tp=2), 2, 1, "bucket")


def check(checkpoint: SavedCheckpoint, ranks: int, tp: int, kind: str) -> None:
    expected = checkpoint.expected()
    for loaded, report in run_ranks(load_on_a_rank, ranks, str(checkpoint.path), tp, kind):
        assert loaded.keys() == expected.keys()
        assert set(report["loaded"]) == expected.keys()
        assert report["untouched"] == []
        for key, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert same_bits(loaded[key], value), key
            else:
                assert loaded[key] == value, key


def transform_on_a_rank(path: str, kind: str) -> tuple[dict[str, Any], int, dict[str, Any]]:
    import torch.distributed as dist
    from torch.distributed.checkpoint import load
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def blank(dim: int, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
        return distribute_tensor(torch.full(shape, 5, dtype=dtype), mesh, [Shard(dim)])

    state = {
        "q": blank(0, 700, 512),
        "k": blank(1, 200, 512),
        "w": blank(1, 512, 1001, dtype=torch.bfloat16),
        "up_gate": blank(0, 900, 512),
        "vocab": blank(0, 1003, 512),
    }
    planner = dcp.StrictLoadPlanner(
        transform={
            "qk": dcp.split(0, ["q", "k"]),
            "w": [dcp.transpose(), dcp.cast(torch.bfloat16)],
            "up_gate": dcp.join(0, ["up", "gate"]),
            "vocab": dcp.pad(0, 1003, -1.0),
        }
    )
    reader = reader_of(kind, path)
    load(state, storage_reader=reader, planner=planner)
    read = reader.bytes_read if kind == "bucket" else 0
    return {k: v.full_tensor() for k, v in state.items()}, read, planner.report.model_dump()


@pytest.mark.parametrize("kind", ["bucket", "torch"])
def test_transforms_fill_shards_and_read_no_more_than_they_need(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    saved = {
        "qk": torch.randn(900, 512),
        "w": torch.randn(1001, 512),
        "up": torch.randn(400, 512),
        "gate": torch.randn(500, 512),
        "vocab": torch.randn(700, 512),
    }
    path = str(save(saved, tmp_path / "step"))
    expected = {
        "q": saved["qk"][:700],
        "k": saved["qk"][700:],
        "w": saved["w"].T.bfloat16(),
        "up_gate": torch.cat([saved["up"], saved["gate"]]),
        "vocab": torch.cat([saved["vocab"], torch.full((303, 512), -1.0)]),
    }
    results = run_ranks(transform_on_a_rank, 3, path, kind)
    for loaded, _, report in results:
        for key, value in expected.items():
            assert same_bits(loaded[key], value), key
        assert set(report["loaded"]) == expected.keys()
    if kind == "bucket":
        # Only the columns of k are read with what lies between them, by each of the ranks.
        needed = sum(value.nbytes for value in saved.values()) + 2 * saved["qk"][700:].nbytes
        assert needed <= sum(read for _, read, _ in results) <= needed * 1.02


def strided_on_a_rank(path: str, kind: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Load shards of several runs of rows; then one whose memory is not what its placements say."""
    import torch.distributed as dist
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def held(rows: int) -> Any:
        return DTensor.from_local(
            torch.full((rows, 3), -1.0),
            mesh,
            [_StridedShard(0, split_factor=2)],
            run_check=False,
            shape=torch.Size((7, 3)),
            stride=(3, 1),
        )

    state: dict[str, Any] = {"w": held(4 if dist.get_rank() == 0 else 3)}
    load(state, storage_reader=reader_of(kind, path), planner=dcp.StrictLoadPlanner(skip=["v"]))
    padded = dcp.StrictLoadPlanner(transform={"v": dcp.pad(0, 7, 9.0)}, rename={"w": "x"}, skip=["x"])
    more: dict[str, Any] = {"v": held(4 if dist.get_rank() == 0 else 3)}
    load(more, storage_reader=reader_of(kind, path), planner=padded)
    local = {"w": state["w"].to_local(), "v": more["v"].to_local()}
    wrong = {
        "w": held(5 if dist.get_rank() == 0 else 2),
        "v": DTensor.from_local(torch.zeros(3, 3), mesh, [Shard(0)], shape=torch.Size((6, 3)), stride=(3, 1)),
    }
    try:
        load(wrong, storage_reader=reader_of(kind, path), planner=dcp.StrictLoadPlanner())
    except CheckpointException as error:
        [(cause, _)] = error.failures.values()
        assert isinstance(cause, dcp.errors.StateMismatchError)
        return local, [f"{found.code} {found.message}" for found in cause.findings]
    raise AssertionError("it was not refused")


@pytest.mark.parametrize("kind", ["bucket", "torch"])
def test_strided_shards_get_their_own_rows_or_are_refused(tmp_path: Path, kind: str) -> None:
    saved = {"w": torch.arange(21.0).reshape(7, 3), "v": torch.arange(18.0).reshape(6, 3)}
    path = str(save(saved, tmp_path / "step"))
    padded = torch.cat([saved["v"], torch.full((1, 3), 9.0)])
    rows = ([0, 1, 4, 5], [2, 3, 6])
    for (local, told), mine in zip(run_ranks(strided_on_a_rank, 2, path, kind), rows, strict=True):
        assert same_bits(local["w"], saved["w"][mine])
        assert same_bits(local["v"], padded[mine])
        assert [line.startswith("keys.shape") and "w: the shard in memory is" in line for line in told] == [
            True,
            True,
        ]


def refused_on_a_rank(path: str) -> tuple[list[tuple[Any, ...]], int, list[int]]:
    import torch.distributed as dist
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.api import CheckpointException

    rank = dist.get_rank()
    state: dict[str, Any] = {"w": torch.full((4,), 5.0), "a": torch.zeros(2)}
    if rank == 1:
        state["w"] = torch.full((5,), 5.0)
    reader = dcp.BucketReader(path)
    try:
        load(state, storage_reader=reader, planner=dcp.StrictLoadPlanner())
    except CheckpointException as error:
        [(cause, _)] = error.failures.values()
        assert isinstance(cause, dcp.errors.StateMismatchError)
        assert (state["w"] == 5).all()
        found = [(f.code, f.key, f.detail.get("ranks")) for f in cause.findings]
        return found, reader.requests, list(error.failures)
    raise AssertionError("it was not refused")


def test_ranks_get_one_error_with_all_their_findings(tmp_path: Path) -> None:
    path = str(save({"w": torch.ones(4), "b": torch.ones(3)}, tmp_path / "step"))
    for found, requests, failed in run_ranks(refused_on_a_rank, 2, path):
        assert found == [
            ("keys.missing", "a", None),
            ("keys.unexpected", "b", None),
            ("keys.shape", "w", [1]),
        ]
        assert requests == 0
        assert failed == [0]


def train(model: Any, optimizer: Any, mesh: Any, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 * step + mesh.get_local_rank("dp"))
        tokens = torch.randint(64, (4, 8), generator=generator)
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss + 0.01 * torch.rand(()) * logits.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def resume_on_a_rank(path: str, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint import save as save_all
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    model, optimizer, mesh = trainer(1, seed=0)
    torch.manual_seed(1)
    train(model, optimizer, mesh, 0, 3)
    save_all(state_of(model, optimizer, step=3, rng=torch.get_rng_state()), checkpoint_id=path)
    train(model, optimizer, mesh, 3, 6)
    uninterrupted = full(state_of(model, optimizer))

    model, optimizer, mesh = trainer(1, seed=9)
    state = state_of(model, optimizer, step=0, rng=torch.zeros_like(torch.get_rng_state()))
    load(state, storage_reader=reader_of(kind, path), planner=dcp.StrictLoadPlanner())
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
        options=StateDictOptions(strict=True),
    )
    torch.set_rng_state(state["rng"])
    train(model, optimizer, mesh, state["step"], 6)
    return uninterrupted, full(state_of(model, optimizer))


@pytest.mark.parametrize("kind", ["bucket", "torch"])
def test_resumed_training_is_uninterrupted_training_to_the_bit(tmp_path: Path, kind: str) -> None:
    for uninterrupted, resumed in run_ranks(resume_on_a_rank, 2, str(tmp_path / "step"), kind):
        assert uninterrupted.keys() == resumed.keys()
        assert any("exp_avg" in key for key in resumed)
        for key, value in uninterrupted.items():
            if isinstance(value, torch.Tensor):
                assert same_bits(value, resumed[key]), key
            else:
                assert value == resumed[key], key


def full_state_on_a_rank(path: str) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )

    model, _, _ = trainer(1, seed=7)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = {"model": get_model_state_dict(model, options=options)}
    if dist.get_rank() == 0:
        with warnings.catch_warnings(action="ignore"):
            load(
                state,
                storage_reader=dcp.BucketReader(path),
                planner=dcp.StrictLoadPlanner(skip=["optim.*", "step", "rng"]),
                no_dist=True,
            )
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state["model"], options=broadcast)
    return full({"model": get_model_state_dict(model)})


def test_a_full_state_dict_is_loaded_on_one_rank_and_broadcast(fsdp2_checkpoint: SavedCheckpoint) -> None:
    expected = fsdp2_checkpoint.expected()
    for loaded in run_ranks(full_state_on_a_rank, 2, str(fsdp2_checkpoint.path)):
        assert loaded
        for key, value in loaded.items():
            assert same_bits(value, expected[key]), key
