"""Exports as whole processes beside ``cat`` of the same files and torch's ``dcp_to_torch_save``.

python -m tests.bench.bench_export [CHECKPOINT] [--workdir DIRECTORY] [--megabytes 2500] [--rounds 3]

Three tables: CHECKPOINT; one that FSDP 2 over tensor parallelism 2 saves here; and one of a quarter of its
size, for the memory. The work directory is best on a memory filesystem, with room for three times as much.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

from tests.bench.measure import Contestant, compare
from tests.bench.synthetic import save_2d

_UPSTREAM = (
    "import sys; from torch.distributed.checkpoint.format_utils import dcp_to_torch_save\n"
    "dcp_to_torch_save(*sys.argv[1:])"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", help="left out: only what is saved here")
    parser.add_argument("--workdir", type=Path, help="where outputs go")
    parser.add_argument("--megabytes", type=int, default=2500, help="size of the checkpoint saved here")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.workdir) as directory:
        work = Path(directory)
        if arguments.checkpoint is not None:
            print(f"{arguments.checkpoint}, {_size(arguments.checkpoint):,} bytes")
            compare(_contestants(arguments.checkpoint, work, upstream=True), "cat", arguments.rounds)
        for megabytes in (arguments.megabytes, arguments.megabytes // 4):
            step = work / f"{megabytes}"
            save_2d(step, megabytes)
            print(f"\nFSDP 2 x TP 2, {_size(step):,} bytes")
            compare(_contestants(step, work, upstream=False), "cat", arguments.rounds)


def _contestants(checkpoint: Path, work: Path, *, upstream: bool) -> list[Contestant]:
    archive, tensors = work / "out.pt", work / "out.safetensors"
    source, ckpt = str(checkpoint), str(Path(sys.executable).with_name("ckpt"))

    def clear() -> None:
        archive.unlink(missing_ok=True)
        tensors.unlink(missing_ok=True)

    concatenate = f"cat {shlex.quote(source)}/*.distcp > {shlex.quote(str(archive))}"
    safetensors = [ckpt, "export", source, str(tensors), "--format", "safetensors", "--quiet"]
    found = [
        Contestant("cat", ["sh", "-c", concatenate], clear),
        Contestant("ckpt export", [ckpt, "export", source, str(archive), "--quiet"], clear),
        Contestant("ckpt export --format safetensors", safetensors, clear),
    ]
    if upstream:
        command = [sys.executable, "-c", _UPSTREAM, source, str(archive)]
        found.append(Contestant("dcp_to_torch_save", command, clear))
    return found


def _size(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.glob("*.distcp"))


if __name__ == "__main__":
    main()
