"""Export to one file, torch.save or safetensors, beside ``cat`` and torch's ``dcp_to_torch_save``.

python -m tests.bench.bench_export CHECKPOINT [WORKDIR]
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

from tests.bench.measure import Contestant, compare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("workdir", type=Path, nargs="?", help="where outputs go; best on a memory filesystem")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.workdir) as directory:
        out = Path(directory) / "out.pt"
        source = shlex.quote(str(arguments.checkpoint))
        upstream = (
            "import sys; from torch.distributed.checkpoint.format_utils import dcp_to_torch_save\n"
            "dcp_to_torch_save(*sys.argv[1:])"
        )

        tensors = out.with_suffix(".safetensors")

        def clear() -> None:
            out.unlink(missing_ok=True)
            tensors.unlink(missing_ok=True)

        compare(
            [
                Contestant("cat", ["sh", "-c", f"cat {source}/*.distcp > {shlex.quote(str(out))}"], clear),
                Contestant(
                    "ckpt export",
                    [
                        str(Path(sys.executable).with_name("ckpt")),
                        "export",
                        str(arguments.checkpoint),
                        str(out),
                        "--quiet",
                    ],
                    clear,
                ),
                Contestant(
                    "ckpt export --format safetensors",
                    [
                        str(Path(sys.executable).with_name("ckpt")),
                        "export",
                        str(arguments.checkpoint),
                        str(tensors),
                        "--format",
                        "safetensors",
                        "--quiet",
                    ],
                    clear,
                ),
                Contestant(
                    "dcp_to_torch_save",
                    [sys.executable, "-c", upstream, str(arguments.checkpoint), str(out)],
                    clear,
                ),
            ],
            anchor="cat",
            rounds=arguments.rounds,
        )


if __name__ == "__main__":
    main()
