"""Exports that the environment ends: exit code 3, a clear line, nothing half-visible, a clean next run."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemWriter, save

from dcp.exporting import machine
from tests.flows.cli.ckpt import Ckpt, Said, command
from tests.support.train import SavedCheckpoint

KINDS = {"torch": "out.pt", "safetensors": "out", "one": "out.safetensors"}
STOP_HALFWAY = """
import sys
import dcp
def progress(done, total):
    if done > total // 2:
        print("halfway", flush=True)
        sys.stdin.read()
dcp.export(sys.argv[1], sys.argv[2], format=sys.argv[3], progress=progress, max_shard_size=150_000_000)
"""


def exported(
    step: Path, dest: Path, kind: str, before: Callable[[], None] | None = None, shard: str = "150MB"
) -> Said:
    """`ckpt export` in a process of its own; ``before`` runs in it first."""
    done = subprocess.run(
        command("export", step, dest, "--format", _format(kind), "--max-shard-size", shard),
        preexec_fn=before,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Said(done.returncode, done.stdout, done.stderr)


def _format(kind: str) -> str:
    return "torch" if kind == "torch" else "safetensors"


def files(directory: Path) -> list[str]:
    """All files below, hidden ones too."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def one_line(said: Said, *parts: str) -> None:
    assert said.code == 3
    assert said.out == ""
    assert all(part in said.err for part in parts), said.err
    assert said.err.startswith("error: ")
    assert "Traceback" not in said.err
    assert len(said.err.splitlines()) <= 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_export_leaves_nothing_to_the_next(
    kind: str, fsdp2_checkpoint: SavedCheckpoint, tmp_path: Path
) -> None:
    dest = tmp_path / "to" / KINDS[kind]
    arguments = [str(fsdp2_checkpoint.path), str(dest), _format(kind)]
    running = subprocess.Popen(
        [sys.executable, "-c", STOP_HALFWAY, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert running.stdout is not None
    assert running.stdout.readline() == b"halfway\n"
    living = files(tmp_path)
    assert len(living) == 1, "what is being written is hidden"
    assert ".partial-" in living[0]
    assert not dest.is_file()

    # A directory of shards belongs to whoever writes it; single files appear one after the other.
    assert exported(fsdp2_checkpoint.path, dest, kind).code == (3 if kind == "safetensors" else 0)
    assert living[0] in files(tmp_path), "it is still being written"
    running.kill()
    running.communicate(timeout=30)
    assert exported(fsdp2_checkpoint.path, dest, kind).code == 0
    assert not [name for name in files(tmp_path) if ".partial-" in name]
    found = {
        "torch": lambda: torch.load(dest, weights_only=True)["model"]["emb.weight"],
        "safetensors": lambda: load_file(dest / "model-00001-of-00001.safetensors")["model.emb.weight"],
        "one": lambda: load_file(dest)["model.emb.weight"],
    }[kind]()
    assert torch.equal(found, fsdp2_checkpoint.expected()["model.emb.weight"])


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_a_full_disk(kind: str, fsdp2_checkpoint: SavedCheckpoint, tmp_path: Path) -> None:
    """A limit on the size of files, which ends writes as a full disk or a quota does."""
    dest = tmp_path / KINDS[kind]
    assert exported(fsdp2_checkpoint.path, dest, kind).code == 0
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    one_line(exported(fsdp2_checkpoint.path, dest, kind, limited), "larger than a file may be")
    one_line(
        exported(fsdp2_checkpoint.path, tmp_path / "x" / KINDS[kind], kind, limited),
        "larger than a file may be",
    )
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before, "the old one stands"


def test_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    """Shards that show together are open together."""
    save(
        {f"w{number}": torch.ones(100) for number in range(120)},
        storage_writer=FileSystemWriter(tmp_path / "step"),
    )

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))

    dest = tmp_path / "out"
    said = exported(tmp_path / "step", dest, "safetensors", limited, shard="400B")
    one_line(said, "may open no more files", "ulimit -n")
    assert not dest.exists()
    assert exported(tmp_path / "step", dest, "safetensors", limited, shard="40kB").code == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_disk_that_is_really_full(fsdp2_checkpoint: SavedCheckpoint, tmp_path: Path) -> None:
    """The other half of the room is taken after the export has looked."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=800k", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    try:
        script = (
            "import sys, dcp\n"
            "from pathlib import Path\n"
            "def fill(done, total):\n"
            "    Path(sys.argv[3]).write_bytes(bytes(500_000))\n"
            "dcp.export(*sys.argv[1:3], progress=fill)"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, fsdp2_checkpoint.path, place / "out.pt", place / "other"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "No space left" in done.stderr
        assert files(place) == ["other"]
        one_line(exported(fsdp2_checkpoint.path, place / "out.pt", "torch"), "of disk and", "are free")
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_no_permission(fsdp2_checkpoint: SavedCheckpoint) -> None:
    """Where not even root may write."""
    for dest in ("/sys/out.pt", "/sys/kernel/none/out.pt"):
        one_line(exported(fsdp2_checkpoint.path, Path(dest), "torch"), "/sys", "permission")


@pytest.mark.parametrize("mode", [[], ["--json"], ["--quiet"]])
def test_a_plan_that_the_machine_cannot_hold(
    mode: list[str], ckpt: Ckpt, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "disk_left", lambda _: 7)
    said = ckpt("export", whole, tmp_path / "out.pt", "--plan", *mode)
    assert said.code == 3
    needs = f"{tmp_path / 'out.pt'} needs"
    if mode == ["--json"]:
        [refusal] = said.document["refusals"]
        assert refusal.startswith(needs)
        assert refusal.endswith("of disk and 7 B are free; free some, or write elsewhere")
    else:
        assert needs in (said.err if mode else said.out)


def test_a_plan_says_where_everything_goes(ckpt: Ckpt, whole: Path, tmp_path: Path) -> None:
    said = ckpt(
        *("export", whole, tmp_path / "out", "--format", "safetensors", "--max-shard-size", "1KB"),
        *("--dtype", "bfloat16", "--tie", "--plan"),
    )
    assert said.code == 0
    assert "model-00002-of-" in said.out
    assert "model.safetensors.index.json" in said.out
    document = ckpt("export", whole, tmp_path / "out.pt", "--include", "model.*", "--plan", "--json").document
    [file] = document["files"]
    assert file["exact"]
    assert all(tensor["offset"] % 64 == 0 for tensor in file["tensors"])
    assert {read["file"] for tensor in file["tensors"] for read in tensor["reads"]} == {
        "__0_0.distcp",
        "__1_0.distcp",
    }
