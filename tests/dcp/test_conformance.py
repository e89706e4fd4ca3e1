"""One suite for every planner and every store: what goes in comes out, and torch reads and writes the same.

torch's own planners, readers and writers are the reference. Whatever of ours takes the place of one of them,
the same state must come back, to the bit, in both directions.
"""

import uuid
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

import dcp
from tests.dcp.load.expectations import same_bits
from tests.support.ranks import run_ranks

BACKENDS = ["local", "memory", "gcs", "s3"]

SAVE_PLANNERS: dict[str, Callable[[], Any]] = {
    "stock": torch_checkpoint.DefaultSavePlanner,
    "checked": dcp.CheckedSavePlanner,
    "checked, lowest rank": lambda: dcp.CheckedSavePlanner(dedup_save_to_lowest_rank=True),
}
LOAD_PLANNERS: dict[str, Callable[[], Any]] = {
    "stock": torch_checkpoint.DefaultLoadPlanner,
    "strict": dcp.StrictLoadPlanner,
    "partial": dcp.PartialLoadPlanner,
}


@pytest.fixture(params=BACKENDS)
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty place in one of the stores."""
    yield from _place(request, request.param)


def _place(request: pytest.FixtureRequest, backend: str) -> Iterator[str]:
    if backend == "local":
        tmp_path: Path = request.getfixturevalue("tmp_path")
        yield str(tmp_path / "run" / "step_1")
    elif backend == "memory":
        url = f"memory://conformance-{uuid.uuid4().hex}/step_1"
        yield url
        files = fsspec.filesystem("memory")
        if files.exists(url):
            files.rm(url, recursive=True)
    else:
        bucket = request.getfixturevalue({"gcs": "gs_bucket", "s3": "s3_bucket"}[backend])
        yield f"{bucket}/run/step_1"


def writer(kind: str, url: str) -> Any:
    if kind == "ours":
        return dcp.BucketWriter(url)
    return FsspecWriter(url) if "://" in url else torch_checkpoint.FileSystemWriter(url)


def reader(kind: str, url: str) -> Any:
    if kind == "ours":
        return dcp.BucketReader(url)
    return FsspecReader(url) if "://" in url else torch_checkpoint.FileSystemReader(url)


def state() -> dict[str, Any]:
    """Values of every kind that a training job saves."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(24, 36, generator=generator)
    return {
        "model": {
            "w": matrix,
            "turned": matrix.T,
            "strided": matrix[::2, 3:30:3],
            "half": matrix.bfloat16(),
            "ints": torch.arange(7),
            "flags": matrix[0] > 0,
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 4),
            "complex": torch.randn(5, generator=generator, dtype=torch.complex64),
            "nan": torch.tensor([float("nan"), float("-inf"), -0.0]),
        },
        "optim": {"groups": [{"lr": 0.1, "betas": [0.9, 0.99]}, {"lr": 0.2, "betas": [0.8, 0.9]}]},
        "step": 12,
        "name": "a run",
    }


def blank(value: Any) -> Any:
    """The same structure, holding something else."""
    if isinstance(value, torch.Tensor):
        return torch.ones_like(value, memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    return [blank(item) for item in value] if isinstance(value, list) else None


def assert_same(loaded: dict[str, Any], saved: dict[str, Any]) -> None:
    flat, expected = flatten_state_dict(loaded)[0], flatten_state_dict(saved)[0]
    assert flat.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert same_bits(flat[key], value), key
        else:
            assert flat[key] == value, key


@pytest.mark.parametrize("saver", SAVE_PLANNERS)
@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_what_is_saved_is_loaded(place: str, kind: str, saver: str) -> None:
    saved = state()
    with warnings.catch_warnings(action="ignore"):  # that it is one process, as was asked
        torch_checkpoint.save(
            saved, storage_writer=writer(kind, place), planner=SAVE_PLANNERS[saver](), no_dist=True
        )
        for read_by, loader in product(["ours", "stock"], LOAD_PLANNERS):
            loaded: dict[str, Any] = blank(saved)
            planner = LOAD_PLANNERS[loader]()
            torch_checkpoint.load(
                loaded, storage_reader=reader(read_by, place), planner=planner, no_dist=True
            )
            assert_same(loaded, saved)
    report = dcp.test_load(place, ["fsdp=2", "tp=3"])
    assert report.ok, report.layouts
    assert dcp.validate(place, scrub=True).ok


# Real ranks. What stands in the memory of one process no other can see, so memory:// has no part in this.


def sharded(ranks: int, fill: bool) -> dict[str, Any]:
    """DTensors of each placement, whole tensors and an object, as this rank holds them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ranks,))
    whole = torch.arange(7 * 20.0).reshape(7, 20)
    if not fill:
        whole = torch.full_like(whole, -1.0)
    return {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
        "everywhere": distribute_tensor(whole, mesh, [Replicate()]),
        "two": distribute_tensor(whole[:2], mesh, [Shard(0)]),
        "plain": whole.clone(),
        "step": 12 if fill else 0,
    }


def save_on_a_rank(url: str, kind: str, saver: str, ranks: int) -> None:
    torch_checkpoint.save(
        sharded(ranks, fill=True), storage_writer=writer(kind, url), planner=SAVE_PLANNERS[saver]()
    )


def load_on_a_rank(url: str, kind: str, loader: str, ranks: int) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor

    loaded = sharded(ranks, fill=False)
    torch_checkpoint.load(loaded, storage_reader=reader(kind, url), planner=LOAD_PLANNERS[loader]())
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in loaded.items()}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local", "gcs"])
@pytest.mark.parametrize(
    ("written", "saver", "read", "loader"),
    [("ours", "checked", "stock", "stock"), ("stock", "stock", "ours", "strict")],
    ids=["ours read by torch", "torch's read by us"],
)
def test_ranks_exchange_checkpoints(
    request: pytest.FixtureRequest, backend: str, written: str, saver: str, read: str, loader: str
) -> None:
    whole = torch.arange(7 * 20.0).reshape(7, 20)
    for place in _place(request, backend):
        run_ranks(save_on_a_rank, 2, place, written, saver, 2)
        for loaded in run_ranks(load_on_a_rank, 3, place, read, loader, 3):
            assert loaded.pop("step") == 12
            assert same_bits(loaded.pop("two"), whole[:2])
            assert loaded.keys() == {"rows", "columns", "everywhere", "plain"}
            assert all(same_bits(value, whole) for value in loaded.values())
