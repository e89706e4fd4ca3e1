"""Save real checkpoints: a small model under FSDP2 (and tensor parallel), trained by AdamW on gloo ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.ranks import run_ranks

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained and how it is saved.

    `steps` optimizer steps are taken before the save, and saved as `step`. `extras` are added to the top of
    the state dict. `writer` holds keyword arguments of torch's FileSystemWriter.
    """

    layers: int = 2
    dim: int = 32
    vocabulary: int = 64
    tp: int = 1
    steps: int = 2
    seed: int = 0
    extras: Mapping[str, Any] = field(default_factory=dict)
    writer: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint in `path` and, beside it, the full values that it must yield."""

    path: Path
    ranks: int
    training: Training

    @property
    def expected_path(self) -> Path:
        """A `torch.save` file: flat dict from the checkpoint's keys to full values, as goldens have it."""
        return _expected_path(self.path)

    def expected(self) -> dict[str, Any]:
        """The content of `expected_path`."""
        import torch

        values: dict[str, Any] = torch.load(self.expected_path, weights_only=True)
        return values


def make_checkpoint(directory: Path, *, ranks: int = 2, **training: Any) -> SavedCheckpoint:
    """Train and save on `ranks` real processes; the other arguments are the fields of `Training`.

    The default takes about 0.4 MB. `directory` must not exist yet.
    """
    wanted = Training(**training)
    if directory.exists():
        raise FileExistsError(f"{directory} exists: a test must not save over another checkpoint")
    run_ranks(_train_and_save, ranks, directory, wanted)
    return SavedCheckpoint(directory, ranks, wanted)


def _expected_path(directory: Path) -> Path:
    return directory.with_name(directory.name + ".expected.pt")


def build_model(training: Training) -> "nn.Module":
    """The bare model, on one process, with the parameters that training starts from."""
    import torch

    from tests.support.model import Decoder

    torch.manual_seed(training.seed)
    return Decoder(training.layers, training.dim, training.vocabulary)


def _train_and_save(directory: Path, training: Training) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    data_ranks = dist.get_world_size() // training.tp
    mesh = init_device_mesh("cpu", (data_ranks, training.tp), mesh_dim_names=("dp", "tp"))
    model = build_model(training)
    for layer in model.layers:  # type: ignore[union-attr]
        if training.tp > 1:
            parallelize_module(layer, mesh["tp"], {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    # The data differ between data-parallel ranks; the global generator, whose state is saved, does not.
    data = torch.Generator().manual_seed(1000 + mesh.get_local_rank("dp"))
    for _ in range(training.steps):
        tokens = torch.randint(training.vocabulary, (4, 8), generator=data)
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {
        "model": model_state,
        "optim": optimizer_state,
        "step": training.steps,
        "rng": torch.get_rng_state(),
        **training.extras,
    }
    save(state, storage_writer=FileSystemWriter(directory, **training.writer))

    flat, _ = flatten_state_dict(state)
    full = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in flat.items()}
    if dist.get_rank() == 0:
        torch.save(full, _expected_path(directory))
