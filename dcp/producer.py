"""Which framework wrote a directory, told from its object names and keys."""

from __future__ import annotations

import re

from dcp.checkpoint import Survey
from dcp.foreign import any_matches
from dcp.index import CheckpointIndex


def guess_producer(found: Survey, index: CheckpointIndex) -> str:
    """The likely writer of a DCP checkpoint, ``"torch DCP"`` where nothing more is known.

    Args:
        found: the checkpoint's directory, or that of a step of several parts.
        index: of the checkpoint, or of the first part.
    """
    keys, names = index.entries, found.objects
    last = found.store.url.rstrip("/").rpartition("/")[2]
    if any_matches(r"context/.*", names) or (last == "weights" and "metadata.json" in names):
        return "NeMo"
    if index.framework_plans or any_matches(r"([^/]+/)?metadata\.json", names):
        return "Megatron-Core torch_dist"
    if "meta.pt" in names:
        return "Lightning"
    if any_matches(r"state\.(model|optimizers|callbacks|rank_zero_seed)\b.*", keys):
        return "Composer"
    if "train_state.step" in keys or any_matches(r"dataloader\.dp_rank_\d+", keys):
        return "torchtitan"
    if any(re.fullmatch(r"(pytorch_model_fsdp|optimizer)_\d+", name) for name in (last, *found.parts)):
        return "accelerate"
    return "torch DCP" if index.ranks is None else "torch DCP, rank-local"
