"""Which framework wrote a directory, told from its object names and keys."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dcp.checkpoint import Kind, Survey
from dcp.index import METADATA, CheckpointIndex

_VERL = re.compile(r"(model|optim|extra_state)_world_size_\d+_rank_\d+\.pt")


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


def describe_foreign(found: Survey) -> str:
    """What a directory without a DCP index is, in words."""
    names = found.objects
    if found.kind is Kind.UNCOMMITTED:
        return "DCP data files without an index" if names else "an empty directory"
    inner = next((name for name in names if name.endswith(f"/{METADATA}")), None)
    if inner is not None:
        place = f"{found.store.url}/{inner.removesuffix(f'/{METADATA}')}"
        return f"a directory above checkpoints; name one, e.g. {place}"
    if _any(names, r"(.*/)?" + _VERL.pattern):
        return "rank-wise torch.save files (model_world_size_N_rank_R.pt, as verl writes), not DCP"
    if _any(names, r"shard-\d+-.*\.safetensors"):
        return "sharded safetensors written by torch's HuggingFaceStorageWriter, not consolidated"
    if _any(names, r"(.*/)?(model|diffusion_pytorch_model).*\.safetensors(\.index\.json)?"):
        return "a Hugging Face safetensors model, not DCP"
    if _any(names, r"(.*/)?pytorch_model.*\.bin(\.index\.json)?"):
        return "a Hugging Face torch.save model, not DCP"
    if _any(names, r"(.*/)?(mp_rank_\d+.*|zero_pp_rank_\d+.*|bf16_zero_pp_rank_\d+.*)\.pt"):
        return "a DeepSpeed ZeRO or classic Megatron checkpoint, not DCP"
    if _any(names, r".*\.safetensors"):
        return "safetensors files, not DCP"
    if _any(names, r".*\.(pt|pth|bin|ckpt)"):
        return "torch.save files, not DCP"
    return "files of no checkpoint format known here"


def _any(names: Iterable[str], pattern: str) -> bool:
    compiled = re.compile(pattern)
    return any(compiled.fullmatch(name) for name in names)
