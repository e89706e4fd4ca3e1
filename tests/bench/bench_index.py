"""Reading and checking a large index beside torch's `read_metadata` and `_validate_global_plan`.

python -m tests.bench.bench_index [--layers 33 330] [--ranks 1024] [--rounds 3] [--only-ours]

Whole processes are timed, imports included. Each index has 3 tensors a layer in one chunk a rank; at 330
layers that is a million chunks and 146 MB. It stands alone in its directory, so `dcp.validate` reports
every data file as missing, on top of reading the index and checking every tensor and record.
"""

from __future__ import annotations

import argparse
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.measure import Contestant, compare

_UPSTREAM = """
import sys
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _validate_global_plan
metadata = FileSystemReader(sys.argv[1]).read_metadata()
assert not _validate_global_plan([], metadata)
"""
_VALIDATE = """
import sys
from dcp.validation import validate
report = validate(sys.argv[1])
assert {finding.code for finding in report.findings} == {"files.missing"}, report.findings[:3]
"""
_PARSE = """
import sys
from dcp.index import parse
with open(sys.argv[1] + "/.metadata", "rb") as file:
    assert parse(file.read()).tensors
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[33, 330])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only-ours", action="store_true", help="leave torch out, for very large indices")
    parser.add_argument("--directory", help="where to put the indices; a temporary directory by default")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        write(Path(arguments.write), arguments.layers[0], arguments.ranks)
        return
    for layers in arguments.layers:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            own = [sys.executable, "-m", "tests.bench.bench_index", "--write", f"{directory}/.metadata"]
            subprocess.run([*own, "--layers", str(layers), "--ranks", str(arguments.ranks)], check=True)
            size = Path(directory, ".metadata").stat().st_size
            print(f"{layers * 3 * arguments.ranks:,} chunks, {size / 1e6:.0f} MB")
            codes = {"torch": _UPSTREAM, "dcp.validate": _VALIDATE, "dcp.parse": _PARSE}
            if arguments.only_ours:
                del codes["torch"]
            compare(
                [Contestant(name, [sys.executable, "-c", code, directory]) for name, code in codes.items()],
                "dcp.validate",
                arguments.rounds,
            )


def write(path: Path, layers: int, ranks: int) -> None:
    """Write an index as torch would, for ``layers`` × 3 tensors of ``ranks`` chunks of 8 rows."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    described: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    planned: dict[str, Any] = {}
    for layer in range(layers):
        for prefix in ("model", "optim.exp_avg", "optim.exp_avg_sq"):
            key = f"{prefix}.layers.{layer}.weight"
            chunks = [
                ChunkStorageMetadata(torch.Size([8 * r, 0]), torch.Size([8, 4096])) for r in range(ranks)
            ]
            described[key] = TensorStorageMetadata(
                TensorProperties(torch.bfloat16), torch.Size([8 * ranks, 4096]), chunks
            )
            planned[key] = tuple(key.split("."))
            for r, chunk in enumerate(chunks):
                storage[MetadataIndex(key, chunk.offsets, r)] = _StorageInfo(
                    f"__{r}_0.distcp", layer * 70000, 70000 - 100
                )
    with path.open("wb") as file:
        pickle.dump(Metadata(described, planned, storage, StorageMeta()), file)


if __name__ == "__main__":
    main()
