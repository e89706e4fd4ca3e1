"""The certificate: digests of finished files equal those of the export, and see every change."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.errors import CheckpointError, NotFoundError
from dcp.exporting import certify, export
from dcp.exporting.certificate import certify_object
from dcp.storage import open_store
from tests.dcp.exporting.test_export import EXPORTABLE
from tests.support.golden import Golden


@pytest.mark.parametrize("golden", EXPORTABLE, ids=lambda golden: golden.name)
def test_torch_files_of_goldens(golden: Golden, tmp_path: Path) -> None:
    out = str(tmp_path / "out.pt")
    report = export(str(golden.directory), out)
    found = certify(out)
    assert {key: found.get(key) for key in report.tensors} == report.tensors


def test_files_that_torch_wrote(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    value = {"a": base, "tied": base, "row": base[1], "column": base[:, 1], "n": {"x": [torch.ones(0), 5]}}
    torch.save(value, tmp_path / "theirs.pt")
    found = certify(str(tmp_path / "theirs.pt"))
    assert found.keys() == {"a", "tied", "row", "n.x.0"}
    assert found["a"] == found["tied"]
    torch.save({"b": base[1].clone()}, tmp_path / "row.pt")
    assert certify(str(tmp_path / "row.pt"))["b"] == found["row"]
    torch.save({"": {"a": base, "": base}, "a": base}, tmp_path / "nameless.pt")
    assert certify(str(tmp_path / "nameless.pt")).keys() == {".a", ".", "a"}


def test_one_bit_changes_one_digest(golden: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    report = export(str(golden("torch_fsdp_tp_2x2")), str(out), include=["model.*"])
    where = out.read_bytes().index(torch.load(out, weights_only=True)["model"]["a.weight"].numpy().tobytes())
    data = bytearray(out.read_bytes())
    data[where + 5] ^= 1
    out.write_bytes(data)
    found = certify(str(out))
    assert [key for key in found if found[key] != report.tensors[key]] == ["model.a.weight"]


def test_no_torch_is_needed(golden: Callable[[str], Path], tmp_path: Path) -> None:
    out = str(tmp_path / "out.pt")
    export(str(golden("torch_tied")), out)
    code = (
        "import sys; from dcp.exporting import certify; assert certify(sys.argv[1])\n"
        "assert not {'torch', 'prefect'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, out], check=True, timeout=60)


def _whole() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(100), "b": [torch.ones(3)]}, buffer)
    return buffer.getvalue()


WHOLE = _whole()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255), st.booleans())
def test_damaged_files_end_in_our_errors(place: int, byte: int, cut: bool) -> None:
    store = open_store("memory://certificates")
    data = WHOLE[:place] if cut else WHOLE[:place] + bytes([byte]) + WHOLE[place + 1 :]
    store.replace("x.pt", data)
    try:
        certify_object(store, "x.pt")
    except CheckpointError as error:
        assert "x.pt" in str(error) or error.detail  # noqa: PT017


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("nothing")
    with pytest.raises(CheckpointError, match="neither"):
        certify(str(tmp_path / "text.pt"))
    with pytest.raises(NotFoundError):
        certify(str(tmp_path / "none.pt"))
