"""A state with everything that is awkward to save, and saving and loading it in this process."""

import re
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint

from dcp.load.reader import BucketReader
from dcp.save import BucketWriter
from dcp.storage import open_store
from tests.dcp.load.expectations import same_bits


def awkward_state() -> dict[str, Any]:
    """Nested, of many dtypes, views of larger storages, empty tensors and objects."""
    torch.manual_seed(3)
    large = torch.randn(300, 7)
    return {
        "model": {
            "weight": torch.randn(257, 33),
            "bfloat": torch.randn(5, 4).bfloat16(),
            "view": large[17:20, 2:4],
            "strided": large.T,
            "conj": torch.randn(4, dtype=torch.complex64).conj(),
            "empty": torch.empty(0, 4),
            "scalar": torch.tensor(2.5, dtype=torch.float64),
            "flags": torch.tensor([True, False]),
            "parameter": torch.nn.Parameter(torch.ones(3)),
        },
        "step": 12,
        "extra": {"text": "x" * 100_000, "list": [1, {"a": torch.arange(3)}], "none": None},
    }


def blank(value: Any) -> Any:
    """The same structure with other content, to be loaded into."""
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list):
        return [blank(item) for item in value]
    return torch.zeros_like(value.detach()) if isinstance(value, torch.Tensor) else 0


def save(state: dict[str, Any], writer: BucketWriter, **options: Any) -> None:
    with warnings.catch_warnings(action="ignore"):  # that it is one process, as was asked
        torch_checkpoint.save(state, storage_writer=writer, no_dist=True, **options)


def load(state: dict[str, Any], place: str) -> dict[str, Any]:
    """What is saved, by torch's own reader where it can read the place, else by `BucketReader`."""
    local = "://" not in place
    reader = torch_checkpoint.FileSystemReader(Path(place)) if local else BucketReader(place)
    with warnings.catch_warnings(action="ignore"):
        torch_checkpoint.load(state, storage_reader=reader, no_dist=True)
    return state


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """Flattened as torch does it."""
    values: dict[str, Any] = torch_checkpoint._nested_dict.flatten_state_dict(state)[0]
    return values


def assert_same(loaded: dict[str, Any], expected: dict[str, Any]) -> None:
    """Both have the same keys, and the same bits or values in them."""
    ours, theirs = flat(loaded), flat(expected)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert same_bits(ours[key], value), key
        else:
            assert ours[key] == value, key


def names(place: str) -> list[str]:
    """What stands at a place, the numbers of data files counted from the first of their save."""
    return sorted(
        re.sub(r"_(\d+)\.distcp$", lambda found: f"_{int(found[1]) % 100_000}.distcp", found.name)
        for found in open_store(place).objects()
    )
