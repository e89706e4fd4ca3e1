"""Digests: alike for what is alike, apart for what is not, and bounded."""

import math
import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp.save import digests
from dcp.save.digests import digest_of


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.arange(12).reshape(3, 4).T, torch.arange(12).reshape(3, 4).T.contiguous()),
        (torch.ones(5).requires_grad_(), torch.ones(5)),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j])),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (["ab", "ab"], ["".join(["a", "b"]), "".join(["a", "b"])]),
        ({"x", "y", "z"}, {"z", "y", "x"}),
        ({"t": torch.arange(3)}, {"t": torch.arange(3)}),
    ],
)
def test_alike(a: Any, b: Any) -> None:
    assert digest_of(a) == digest_of(b) is not None


VALUES: list[Any] = [
    *(0, False, 0.0, -0.0, "", b"", None, [], (), {}, set(), [0], [[0]], "0", b"0", 1, 1 << 70, 1e-300),
    *(float("nan"), {"a": 1}, {"a": 2}, {"b": 1}, ["a", 1], OrderedDict(a=1)),
    *(np.arange(3), np.arange(3.0), np.random.RandomState(1).get_state(), random.Random(1).getstate()),
    *(torch.zeros(2), torch.zeros(3), torch.zeros(2, 1), torch.zeros(2).double(), torch.zeros(2).int()),
    *({"t": torch.arange(3)}, {"t": torch.arange(1, 4)}, torch.Generator, torch.Size([1])),
    *(torch.ones(2).to_sparse(), torch.zeros(2).to_sparse()),
]


def test_apart() -> None:
    found = [digest_of(value) for value in VALUES]
    assert len(set(found)) == len(VALUES)
    assert found == [digest_of(value) for value in VALUES]


@pytest.mark.parametrize("strided", [False, True])
def test_large_tensors_are_sampled_everywhere(strided: bool) -> None:
    value = torch.zeros(1000, 1000)
    changed = value.clone()
    changed[400:440] = 1
    changed_end, changed_start = value.clone(), value.clone()
    changed_end[-1, -1] = 1
    changed_start[0, 0] = 1
    views = [value, changed, changed_end, changed_start]
    if strided:
        views = [v.T.contiguous().T for v in views]
    found = [digest_of(v, limit=1 << 16) for v in views]
    assert len(set(found)) == 4
    assert found[0] == digest_of(value, limit=1 << 16)


@pytest.mark.parametrize("strided", [False, True])
def test_one_element_of_a_large_tensor_is_seen(strided: bool) -> None:
    value = torch.zeros(3, 1001, 2003).permute(1, 2, 0) if strided else torch.zeros(1001, 2003, 3)
    assert value.nbytes > 16 << 20
    changed = value.clone()
    changed[456, 1234, 1] = 1
    assert digest_of(value) == digest_of(value.contiguous()) != digest_of(changed)


@given(
    shape=st.lists(st.integers(0, 6), min_size=0, max_size=4),
    order=st.randoms(use_true_random=False),
    most=st.integers(4, 200),
)
def test_pieces_are_the_whole_in_order(shape: list[int], order: random.Random, most: int) -> None:
    value = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    value = value.permute(order.sample(range(value.dim()), value.dim()))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(digests, "_PIECE", most)
        pieces = list(digests._pieces(value))
    assert all(piece.nbytes <= most for piece in pieces) or value.nbytes <= most
    assert torch.equal(torch.cat([piece.reshape(-1) for piece in pieces]), value.reshape(-1))


def test_tensors_inside_of_an_object_are_seen_whole() -> None:
    value = torch.zeros(1 << 20)
    changed = value.clone()
    changed[123_457] = 1
    assert digest_of({"t": value, "n": 1}) != digest_of({"t": changed, "n": 1})


def test_large_objects_are_bounded_and_sampled() -> None:
    value = {"bytes": bytes(1 << 20), "list": list(range(50_000))}
    assert digest_of(value, limit=4096) == digest_of(dict(value), limit=4096)
    assert digest_of(value, limit=4096) != digest_of({**value, "bytes": b"1" * (1 << 20)}, limit=4096)


def test_there_is_nothing_to_compare_on_the_meta_device() -> None:
    assert digest_of(torch.ones(3, device="meta")) is None
