"""What a directory that is no DCP checkpoint is instead, told from the names of its objects."""

from __future__ import annotations

import re
from collections.abc import Collection

from dcp.index import METADATA

_VERL = re.compile(r"(model|optim|extra_state)_world_size_\d+_rank_\d+\.pt")


def describe_foreign(url: str, names: Collection[str]) -> str:
    """What a directory without a DCP index or DCP data files is, in words.

    Args:
        url: the directory.
        names: of its objects.
    """
    inner = next((name for name in names if name.endswith(f"/{METADATA}")), None)
    if inner is not None:
        place = f"{url}/{inner.removesuffix(f'/{METADATA}')}"
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


def _any(names: Collection[str], pattern: str) -> bool:
    compiled = re.compile(pattern)
    return any(compiled.fullmatch(name) for name in names)
