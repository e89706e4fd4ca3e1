"""Two-rank training that saves PyTorch Distributed Checkpoints, as people write it.

An FSDP2 model and AdamW; every few steps all ranks save model, optimizer and progress together. Late in
the run the model gets wrapped, as happens when somebody refactors: from then on every key in the checkpoint
has another name, and code that resumes from the earlier ones would not find its weights.

It runs under any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT::

    torchrun --nproc-per-node 2 -m flows.demo.train OUT
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

VOCABULARY = 512
WIDTH = 96
LAYERS = 3


class Block(nn.Module):
    """A residual block over the last dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        update: torch.Tensor = self.down(torch.relu(self.up(self.norm(hidden))))
        return hidden + update


class Decoder(nn.Module):
    """Token ids ``[batch, time]`` to logits ``[batch, time, vocabulary]``."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


class Policy(nn.Module):
    """The refactoring: the same model, one level deeper, so that `head.weight` becomes `net.head.weight`."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(tokens)
        return logits


def batch(generator: torch.Generator) -> torch.Tensor:
    """Token ids ``[16, 17]``: sequences that count upwards in strides, which a model can learn."""
    start = torch.randint(VOCABULARY, (16, 1), generator=generator)
    stride = torch.randint(1, 4, (16, 1), generator=generator)
    return (start + stride * torch.arange(17)) % VOCABULARY


def train(out: Path, steps: int, save_every: int, wrap_after: int) -> None:
    """Train for ``steps`` optimizer steps and save to ``out/step_N`` every ``save_every``."""
    torch.manual_seed(0)
    model: nn.Module = Decoder(LAYERS, WIDTH, VOCABULARY)
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Every rank sees data of its own.
    data = torch.Generator().manual_seed(1000 + dist.get_rank())

    for step in range(1, steps + 1):
        tokens = batch(data)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % save_every == 0:
            mean_loss = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean_loss)
            model_state, optimizer_state = get_state_dict(model, optimizer)
            dcp.save(  # type: ignore[attr-defined]
                {"model": model_state, "optim": optimizer_state, "step": step, "loss": mean_loss.item()},
                checkpoint_id=str(out / f"step_{step}"),
            )
            if dist.get_rank() == 0:
                print(json.dumps({"step": step, "loss": mean_loss.item()}), flush=True)  # noqa: T201
        if step == wrap_after:
            model = Policy(model)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="Train on all ranks and save checkpoints.")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory in which step_N directories appear")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--wrap-after", type=int, default=40, help="wrap the model after this step")
    parser.add_argument("--rendezvous", default="env://", help="where the ranks meet, e.g. file:///tmp/meet")
    given = parser.parse_args()
    dist.init_process_group(
        "gloo",
        init_method=given.rendezvous,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    train(given.out, given.steps, given.save_every, given.wrap_after)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
