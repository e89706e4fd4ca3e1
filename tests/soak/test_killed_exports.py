"""Exports killed at random moments: no file is ever visible that is not whole, and the next run clears up.

python -m pytest tests/soak/test_killed_exports.py
"""

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from dcp.errors import NotFoundError
from dcp.exporting import certify, export
from dcp.storage import open_store

KILLS = int(os.environ.get("KILLS", "25"))
EXPORT = """
import sys
import dcp.exporting, gcsfs
print("ready", flush=True)
dcp.exporting.export(sys.argv[1], sys.argv[2], format=sys.argv[3], max_shard_size=9_000_000)
print("done", flush=True)
"""


def visible(url: str) -> dict[str, int]:
    try:
        return {info.name: info.size for info in open_store(url).objects()}
    except NotFoundError:
        return {}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("format", ["torch", "safetensors"])
@pytest.mark.parametrize("kind", ["local", "gs"])
def test_what_is_visible_is_whole(
    kind: str, format: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    state = {f"w{n}": torch.randn(1_000_000) for n in range(20)}
    save(state, storage_writer=FileSystemWriter(tmp_path / "step_1"), no_dist=True)
    root = str(tmp_path / "out") if kind == "local" else request.getfixturevalue("gs_bucket") + "/out"
    dest = f"{root}/model.pt" if format == "torch" else f"{root}/model"
    step = str(tmp_path / "step_1")
    arguments = (step, dest, format)
    reference = export(*arguments[:2], format=format, max_shard_size=9_000_000, sha256=True)  # type: ignore[arg-type]
    wanted = {file.name: file.sha256 for file in reference.files}
    ended = {"killed": 0, "done": 0}
    for number in range(KILLS):
        if number % 2:
            for name in visible(root):
                open_store(root).remove(name)
        running = subprocess.Popen([sys.executable, "-c", EXPORT, *arguments], stdout=subprocess.PIPE)
        assert running.stdout is not None
        assert running.stdout.readline() == b"ready\n"
        time.sleep(moments.uniform(0, 0.6))
        running.send_signal(signal.SIGKILL)
        said, _ = running.communicate(timeout=60)
        ended["done" if said else "killed"] += 1
        for name in visible(root):
            data = open_store(root).read(name, 1 << 30)
            assert hashlib.sha256(data).hexdigest() == wanted[name], (number, name)
    export(*arguments[:2], format=format, max_shard_size=9_000_000)  # type: ignore[arg-type]
    assert visible(root).keys() == wanted.keys()
    if kind == "local":
        assert not [path for path in (tmp_path / "out").rglob("*") if ".partial-" in path.name]
    tensors = {
        key: tensor
        for name in wanted
        if not name.endswith(".json")
        for key, tensor in certify(f"{root}/{name}").items()
    }
    assert tensors == reference.tensors
    print(ended)
    assert ended["killed"]
