"""States as torch holds them, as the exporter takes them, and as both write them."""

import io
import zipfile
from collections import OrderedDict
from typing import Any

import torch

from dcp.exporting.state import Storage, TensorSpec, TorchState, build_state
from dcp.exporting.torch_file import TorchFileWriter


def torch_bytes(state: object) -> bytes:
    """What `torch.save` writes to a buffer."""
    out = io.BytesIO()
    torch.save(state, out)
    return out.getvalue()


def archive_pickle(state: object) -> bytes:
    """The `data.pkl` of what `torch.save` writes."""
    with zipfile.ZipFile(io.BytesIO(torch_bytes(state))) as archive:
        return archive.read("archive/data.pkl")


class Described:
    """A state in which each tensor is replaced by its description; containers and strings stay shared.

    Attributes:
        state: what the exporter takes.
        content: bytes of each storage.
    """

    def __init__(self, state: object) -> None:
        self.content: dict[Storage, bytes] = {}
        self._storages: dict[int, Storage] = {}
        self._done: dict[int, Any] = {}
        self._kept: list[object] = []
        self.state = self._replace(state)

    def _replace(self, value: Any) -> Any:
        if id(value) not in self._done:
            self._kept.append(value)
            self._done[id(value)] = self._replacement(value)
        return self._done[id(value)]

    def _replacement(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._describe(value)
        if type(value) in {dict, OrderedDict}:
            return type(value)((key, self._replace(item)) for key, item in value.items())
        if type(value) in {list, tuple} and value:
            return type(value)(map(self._replace, value))
        return value

    def _describe(self, tensor: torch.Tensor) -> TensorSpec:
        untyped = tensor.untyped_storage()
        self._kept.append(untyped)
        if untyped._cdata not in self._storages:
            made = self._storages[untyped._cdata] = Storage(untyped.nbytes())
            self.content[made] = bytes(torch.empty(0, dtype=torch.uint8).set_(untyped).numpy())
        return TensorSpec(
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            self._storages[untyped._cdata],
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.requires_grad,
            tensor.is_conj(),
            tensor.is_neg(),
        )


def written_bytes(state: object, *, archive_name: str = "archive", piece: int = 1 << 20) -> bytes:
    """What the exporter writes for a torch state, in pieces of ``piece`` bytes."""
    described = Described(state)
    built = build_state(described.state)
    return write_file(built, described.content, archive_name=archive_name, piece=piece)


def write_file(
    built: TorchState, content: dict[Storage, bytes], *, archive_name: str = "archive", piece: int = 1 << 20
) -> bytes:
    """The whole file of a built state."""
    out = io.BytesIO()
    writer = TorchFileWriter(out, built.pickle, built.sizes, archive_name=archive_name)
    for key, storage in built.storages:
        data = content[storage]
        for start in range(0, len(data), piece):
            writer.write_storage(key, data[start : start + piece])
    assert writer.finish() == len(out.getvalue()) == writer.plan.size
    return out.getvalue()
