"""What a directory that is no DCP checkpoint is instead, told from the names of its objects."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from dcp.index import METADATA

_KINDS = (
    (
        r"(.*/)?(model|optim|extra_state)_world_size_\d+_rank_\d+\.pt",
        "rank-wise torch.save files (model_world_size_N_rank_R.pt, as verl writes), not DCP",
    ),
    (
        r"shard-\d+-.*\.safetensors",
        "sharded safetensors written by torch's HuggingFaceStorageWriter, not consolidated",
    ),
    (
        r"(.*/)?(model|diffusion_pytorch_model).*\.safetensors(\.index\.json)?",
        "a Hugging Face safetensors model, not DCP",
    ),
    (r"(.*/)?pytorch_model.*\.bin(\.index\.json)?", "a Hugging Face torch.save model, not DCP"),
    (
        r"(.*/)?(mp_rank_\d+.*|zero_pp_rank_\d+.*|bf16_zero_pp_rank_\d+.*)\.pt",
        "a DeepSpeed ZeRO or classic Megatron checkpoint, not DCP",
    ),
    (r".*\.safetensors", "safetensors files, not DCP"),
    (r".*\.(pt|pth|bin|ckpt)", "torch.save files, not DCP"),
)
"""Patterns of whole object names and what has them; the first that fits counts."""


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
    fitting = (words for pattern, words in _KINDS if any_matches(pattern, names))
    return next(fitting, "files of no checkpoint format known here")


def any_matches(pattern: str, names: Iterable[str]) -> bool:
    """Whether one of the names, as a whole, is as the regular expression says."""
    compiled = re.compile(pattern)
    return any(compiled.fullmatch(name) for name in names)
