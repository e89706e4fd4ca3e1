"""Assemblies against torch: whatever is done to a tensor, each region of it comes from the right place."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp.boxes import Box, intersect, whole
from dcp.errors import CheckpointError, UsageError
from dcp.load.assembly import Assembly
from dcp.load.transforms import Arrangement, cast, join, pad, parse, split, transpose
from tests.dcp.load.expectations import region


def made(assembly: Assembly, saved: dict[str, torch.Tensor], box: Box) -> torch.Tensor:
    """A region of an assembly, piece by piece, as a rank would read it."""
    result = torch.full(box.sizes, -1)
    for fill in assembly.fills:
        common = intersect(fill.box, box)
        if common is not None:
            region(result, common.shifted(box.offsets)).fill_(fill.value)
    for part in assembly.parts:
        found = part.within(box)
        if found is not None:
            common, source = found
            order = [part.order[dim] for dim in range(len(part.order))]
            region(result, common.shifted(box.offsets)).copy_(
                region(saved[part.source], source).permute(order)
            )
    return result


@st.composite
def chains(draw: st.DrawFn) -> tuple[Assembly, torch.Tensor, dict[str, torch.Tensor]]:
    """An assembly after some steps, and the same done by torch."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    saved = {}

    def fresh(shape: tuple[int, ...]) -> tuple[Assembly, torch.Tensor]:
        name = f"t{len(saved)}"
        start = 1000 * len(saved)
        size = torch.Size(shape).numel()
        saved[name] = torch.arange(start, start + size).reshape(shape)
        return Assembly.of(name, shape, "int64"), saved[name]

    assembly, tensor = fresh(shape)
    for _ in range(draw(st.integers(0, 5))):
        dims = st.integers(-tensor.ndim, tensor.ndim - 1)
        dim = draw(dims)
        length = tensor.shape[dim]
        match draw(st.sampled_from(["transpose", "split", "join", "pad"])):
            case "transpose":
                other = draw(dims)
                assembly, tensor = assembly.transposed(dim, other), tensor.transpose(dim, other)
            case "split" if length > 1:
                cut = draw(st.integers(1, length - 1))
                which = draw(st.integers(0, 1))
                assembly = assembly.pieces(dim, [cut, length - cut])[which]
                tensor = tensor.split([cut, length - cut], dim)[which]
            case "join":
                sizes = list(tensor.shape)
                sizes[dim] = draw(st.integers(1, 3))
                other_assembly, other_tensor = fresh(tuple(sizes))
                assembly = Assembly.joined(dim, [("x", assembly), ("y", other_assembly)])
                tensor = torch.cat([tensor, other_tensor], dim)
            case "pad":
                lack = list(tensor.shape)
                lack[dim] = draw(st.integers(0, 3))
                assembly = assembly.padded(dim, length + lack[dim], -7)
                tensor = torch.cat([tensor, torch.full(lack, -7)], dim)
    return assembly, tensor, saved


@given(chains(), st.data())
def test_any_region_is_what_torch_makes_of_it(
    chain: tuple[Assembly, torch.Tensor, dict[str, torch.Tensor]], data: st.DataObject
) -> None:
    assembly, tensor, saved = chain
    assert assembly.shape == tuple(tensor.shape)
    assert torch.equal(made(assembly, saved, whole(assembly.shape)), tensor)
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in assembly.shape)
    sizes = tuple(
        data.draw(st.integers(1, size - offset)) for size, offset in zip(assembly.shape, offsets, strict=True)
    )
    box = Box(offsets, sizes)
    assert torch.equal(made(assembly, saved, box), region(tensor, box))


def arranged(tensors: dict[str, tuple[int, ...]], wanted: dict[str, Any], transform: Any) -> Arrangement:
    result = Arrangement({k: Assembly.of(k, s, "float32") for k, s in tensors.items()}, wanted)
    result.apply(parse(transform))
    return result


def test_fused_weights_are_split_by_the_sizes_of_their_targets() -> None:
    wanted = {f"l.{n}.{k}.w": (size, 4) for n in (0, 1) for k, size in (("q", 8), ("k", 2), ("v", 2))}
    rule = {"*.qkv.w": split(0, ["*.q.w", "*.k.w", "*.v.w"])}
    result = arranged({"l.0.qkv.w": (12, 4), "l.1.qkv.w": (12, 4)}, wanted, rule)
    assert {key: made.shape for key, made in result.tensors.items()} == wanted
    [part] = result.tensors["l.1.k.w"].parts
    assert (part.source, part.origin) == ("l.1.qkv.w", (8, 0))


def test_what_cannot_be_done_is_a_finding() -> None:
    rule = {
        "a": split(0, ["b", "c"], sizes=[1, 2]),
        "d": transpose(),
        "e": pad(0, 1),
        "f": join(1, ["x", "y"]),
        "g": split(0, ["x", "h"], sizes=[2, 2]),
    }
    tensors = {"a": (4,), "d": (3,), "e": (4,), "x": (2, 1), "y": (3, 1), "g": (4, 1)}
    result = arranged(tensors, {"f": (2, 2)}, rule)
    found = {f.key: (f.code, f.message) for f in result.findings}
    assert {key: code for key, (code, _) in found.items()} == {
        "a": "keys.shape",
        "d": "keys.shape",
        "e": "keys.shape",
        "f": "keys.shape",
        "g": "keys.renamed",
    }
    assert found["a"][1] == "cannot split along 0 into [1, 2]: a has shape [4] there"
    assert "x is in the checkpoint too" in found["g"][1]


def test_a_join_that_does_not_fit_names_all_its_members() -> None:
    tensors = {"q": (2, 4), "e": (5, 3), "h": (2, 4)}
    shapes = arranged(tensors, {"j": (7, 4)}, {"j": join(0, ["q", "e"])})
    [found] = shapes.findings
    assert (found.code, found.key) == ("keys.shape", "j")
    assert found.message.startswith("j: cannot join along 0 q [2, 4] and e [5, 3]:")
    types = arranged(tensors, {"j": (4, 4)}, {"h": cast("bfloat16"), "j": join(0, ["q", "h"])})
    [found] = types.findings
    assert (found.code, found.key) == ("keys.dtype", "j")
    assert found.message.startswith("j: cannot join q (float32) and h (bfloat16): ")


def test_a_split_along_no_dimension_says_so() -> None:
    result = arranged({"qkv": (6, 4)}, {"a": (6, 1), "b": (6, 3)}, {"qkv": split(7, ["a", "b"])})
    assert [f.message for f in result.findings] == [
        "cannot split along dimension 7: qkv has shape [6, 4] there"
    ]


def test_a_join_of_which_something_is_absent_says_what() -> None:
    result = arranged({"q": (2, 2)}, {"qk": (4, 2)}, {"qk": join(0, ["q", "k"])})
    assert result.unmade == {"qk": "qk is joined from q and k; absent is k"}


def test_transforms_that_make_no_sense() -> None:
    for wrong in (lambda: cast("float"), lambda: split(0, []), lambda: split(0, ["a"], sizes=[1, 2])):
        with pytest.raises(UsageError):
            wrong()
    with pytest.raises(UsageError, match="join"):
        join(0, "qkv")
    with pytest.raises(UsageError, match="must stand first"):
        parse({"a": [cast("int8"), join(0, ["b"])]})
    with pytest.raises(UsageError, match="is none"):
        parse({"a": torch.float32})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="stars"):
        parse({"*.w": split(0, ["x", "y"], sizes=[1, 1])})
    with pytest.raises(UsageError, match="stars"):
        parse({"*.qk": join(0, ["*.q", "*.*"])})
    assert arranged({}, {}, {"nothing": cast(torch.bfloat16)}).idle == ["nothing"]
    with pytest.raises(CheckpointError):
        Assembly.joined(0, [("a", Assembly.of("a", (2,), "int8")), ("b", Assembly.of("b", (2,), "int16"))])
