"""Which framework wrote a directory, told from its object names and keys."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dcp.checkpoint import Survey
from dcp.index import CheckpointIndex


def guess_producer(found: Survey, index: CheckpointIndex) -> str:
    """The likely writer of a DCP checkpoint, ``"torch DCP"`` where nothing more is known.

    Args:
        found: the checkpoint's directory, or that of a step of several parts.
        index: of the checkpoint, or of the first part.
    """
    keys, names = index.entries, found.objects
    last = found.store.url.rstrip("/").rpartition("/")[2]
    if _any(names, r"context/.*") or (last == "weights" and "metadata.json" in names):
        return "NeMo"
    if index.framework_plans or _any(names, r"([^/]+/)?metadata\.json"):
        return "Megatron-Core torch_dist"
    if "meta.pt" in names:
        return "Lightning"
    if _any(keys, r"state\.(model|optimizers|callbacks|rank_zero_seed)\b.*"):
        return "Composer"
    if "train_state.step" in keys or _any(keys, r"dataloader\.dp_rank_\d+"):
        return "torchtitan"
    if any(re.fullmatch(r"(pytorch_model_fsdp|optimizer)_\d+", name) for name in (last, *found.parts)):
        return "accelerate"
    return "torch DCP" if index.ranks is None else "torch DCP, rank-local"


def _any(names: Iterable[str], pattern: str) -> bool:
    compiled = re.compile(pattern)
    return any(compiled.fullmatch(name) for name in names)
