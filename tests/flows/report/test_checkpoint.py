"""What is gathered of a checkpoint, held against files in `data/`: delete one to have it written anew."""

import base64
import json
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dcp.storage import open_store
from flows.report.checkpoint import CheckpointFacts, gather_checkpoint
from flows.report.checkpoint_page import render_checkpoint, verdict_of
from tests.flows.report.conftest import grid
from tests.support.indices import Region, rows, write_index

_DATA = Path(__file__).parent / "data"
_OF_THE_PLACE = ("url", "made", "changed", "fingerprint", "export")
"""What depends on where, when and on which machine."""


def keys_of(facts: CheckpointFacts) -> dict[str, Any]:
    """The columns of keys that a page embeds."""
    assert facts.contents is not None
    keys: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(facts.contents.keys)))
    return keys


def _document(facts: CheckpointFacts) -> Any:
    document = {name: value for name, value in asdict(facts).items() if name not in _OF_THE_PLACE}
    if facts.contents is not None:
        document["contents"] = {**facts.contents.document(), "keys": keys_of(facts)}
        # How small zlib gets it is its own business.
        for packed in ("pools", "places"):
            document["contents"][packed] = [pool[:3] for pool in document["contents"][packed]]
    return json.loads(json.dumps(document))


@pytest.mark.parametrize(
    ("name", "validation"),
    [
        ("torch_fsdp_tp_2x2", {"scrub": True}),
        ("torch_fsdp2_rank_local", {}),
        ("not_dcp_verl_fsdp", {}),
    ],
)
def test_it_is_what_it_was(
    golden_copy: Callable[[str], Path], name: str, validation: Mapping[str, Any]
) -> None:
    directory = golden_copy(name)
    document = json.dumps(_document(gather_checkpoint(str(directory), **validation)))
    found = json.loads(document.replace(str(directory), "STEP"))
    file = _DATA / f"{name}.json"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        pytest.fail(f"{file.name} did not exist and was written; look at it and commit it")
    assert found == json.loads(file.read_text())


def test_a_step_of_several_parts_is_one_page(golden_copy: Callable[[str], Path], tmp_path: Path) -> None:
    step = tmp_path / "step_1"
    step.mkdir()
    golden_copy("torch_tied").rename(step / "model")
    golden_copy("torch_fsdp2_zstd").rename(step / "optim")
    facts = gather_checkpoint(str(step))
    assert facts.ok
    assert [part.part for part in facts.loads.parts] == ["model", "optim"]
    keys = keys_of(facts)
    assert {key.partition("/")[0] for key in keys["names"]} == {"model", "optim"}
    assert all(facts.contents and keys["files"][file].startswith("optim/__") for file in keys["pattern"][-1:])
    assert "model/__0_0.distcp" in {file.name for file in facts.shares.files}
    landmarks = re.findall(r'role="region" aria-label="([^"]*)"', render_checkpoint(facts))
    assert len(landmarks) == len(set(landmarks)) == 3


def test_an_unfinished_save_has_a_page(golden_copy: Callable[[str], Path]) -> None:
    step = golden_copy("torch_tied")
    (step / ".metadata").unlink()
    facts = gather_checkpoint(str(step), grace_seconds=0.0)
    assert verdict_of(facts).word == "Incomplete"
    assert facts.contents is None
    page = render_checkpoint(facts)
    assert "incomplete.no-metadata" in page
    assert "wait; otherwise resume from an earlier step" in page
    assert 'id="contents"' not in page
    assert "--scrub" not in page, "nothing can be read"
    assert "every save waits" not in page, "what each would have written is not known"


def test_an_empty_directory_has_a_page(tmp_path: Path) -> None:
    page = render_checkpoint(gather_checkpoint(str(tmp_path)))
    assert "Incomplete" in page
    assert "<tbody></tbody>" not in page


def test_imbalance_is_told(tmp_path: Path) -> None:
    heavy: list[Region] = [([0], [7000], 0), ([7000], [1000], 1)]
    facts = gather_checkpoint(str(write_index(tmp_path / "step_1", {"w": ([8000], heavy)})))
    assert not facts.shares.even
    assert facts.shares.heaviest is not None
    assert facts.shares.heaviest.rank == 0
    assert "rank 0 wrote 14.5 KiB, 1.7 times the mean" in render_checkpoint(facts)


def test_faults_and_marks_go_with_their_key(tmp_path: Path) -> None:
    whole = grid((64, 32), 8, 2)
    tensors = {"whole": ((64, 32), whole), "torn": ((64, 32), whole[1:])}
    keys = keys_of(gather_checkpoint(str(write_index(tmp_path / "step_1", tensors))))
    torn = str(keys["names"].index("torn"))
    assert keys["marks"] == {torn: "error"}
    assert keys["faults"] == {torn: [["gap", 0, 0, 8, 16]]}


def test_many_long_names_are_cut_shorter_and_marked_keys_are_kept(tmp_path: Path) -> None:
    import secrets

    from dcp.checkpoint import read_index
    from dcp.findings import finding
    from flows.report.contents import BUDGET, pack_contents

    tensors = {f"{secrets.token_hex(400)}.{i}": rows(1, 1, 1, ranks=1) for i in range(3000)}
    entries = read_index(str(write_index(tmp_path / "step_1", tensors))).entries
    last = next(reversed(entries))
    contents = pack_contents(
        entries, {"__0_0.distcp": 1 << 30}, [finding("tiling.gap", "gap", key=last)], None
    )
    keys = json.loads(zlib.decompress(base64.b64decode(contents.keys)))
    assert len(contents.keys) <= BUDGET
    assert contents.left_out == 0
    assert max(map(len, keys["names"])) < 400
    assert keys["marks"] == {str(len(entries) - 1): "error"}


def test_a_page_can_be_written_to_a_bucket(gs_bucket: str, golden: Callable[[str], Path]) -> None:
    from flows.report.making import report_checkpoint

    saved = report_checkpoint(
        str(golden("torch_tied")), f"{gs_bucket}/pages/tied.html", validation={"copied": True}
    )
    assert saved.report == f"{gs_bucket}/pages/tied.html"
    page = open_store(f"{gs_bucket}/pages").read("tied.html", 1 << 22)
    assert len(page) == saved.bytes
    assert page.startswith(b"<!doctype html>")


def test_its_index_is_read_once_and_its_forecast_needs_no_torch(tmp_path: Path) -> None:
    step = write_index(tmp_path / "step_1", {"w": rows(64, 8, 16, ranks=4)})
    code = (
        "import sys, dcp.index, dcp.checkpoint\n"
        "read, parse = [], dcp.checkpoint.parse\n"
        "dcp.checkpoint.parse = lambda *a, **k: read.append(a) or parse(*a, **k)\n"
        "from flows.report.checkpoint import gather_checkpoint\n"
        "facts = gather_checkpoint(sys.argv[1])\n"
        "assert facts.export and facts.loads.parts[0].costs[-1].ranks == 1024, facts.loads\n"
        "assert len(read) == 1, read\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(step)], check=True, timeout=120)
