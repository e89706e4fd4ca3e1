"""What goldens and fresh checkpoints must yield, and their bits."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint

from dcp.boxes import Box
from tests.support.golden import GOLDENS, Golden

LISTED_ONLY = {"torch_objects", "torch_per_rank_objects"}
"""Goldens whose expected values need classes that do not exist here."""
LOADABLE = [g for g in GOLDENS if g.expected is not None and g.name != "torch_hf_sharded"]
"""Goldens that have an index; `torch_hf_sharded` has none."""


def expected_tensors(golden: Golden) -> dict[str, torch.Tensor]:
    """The tensors that a golden must yield, by key; those of `LISTED_ONLY` are not known."""
    if golden.name in LISTED_ONLY:
        return {}
    assert golden.expected is not None
    values: dict[str, Any] = torch.load(golden.expected, weights_only=False)
    return {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are of one dtype and shape and hold the same bits, NaN or not."""
    return (a.dtype, a.shape) == (b.dtype, b.shape) and content(a) == content(b)


def content(tensor: torch.Tensor) -> bytes:
    """The elements' bytes in C order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def region(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The part of a whole tensor in ``box``."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def save(state: dict[str, Any], path: Path, **options: Any) -> Path:
    """Save a checkpoint from this process alone."""
    with warnings.catch_warnings(action="ignore"):  # that it is one process, as was asked
        torch_checkpoint.save(state, checkpoint_id=path, no_dist=True, **options)
    return path


class Sabotage:
    """Unpickling it makes the directory ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)
