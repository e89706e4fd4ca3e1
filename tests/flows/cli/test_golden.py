"""What `ckpt` prints, word for word: for a person at 80 and 200 columns, as JSON, and in quiet mode.

Each file in ``tests/data/terminal`` is one command line. After a change that is meant, write them anew with
``pytest tests/flows/cli/test_golden.py --update-golden`` and read the difference before it is committed. What
differs from run to run (places, times, fingerprints) is replaced by `settled`, here and nowhere else.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flows.cli.command import guarded
from flows.cli.lifecycle_views import errors_of_pass, errors_of_step, show_pass, show_step
from flows.cli.output import Output
from flows.passes import PassReport
from tests.flows.cli.ckpt import Ckpt, Said
from tests.flows.cli.test_help import COMMANDS
from tests.support import golden
from tests.support.lifecycle import OTHER_KEYS, Lifecycle

DATA = Path(__file__).parents[2] / "data" / "terminal"
WIDTHS = (80, 200)

ODD_KEYS = (
    "\x1b[31mred\x1b[0m",
    "\u202egnirts desrever",
    "line\nbreak",
    "zero\u200bwidth",
    "משקל.שלום",
    "模型.层.权重",
    "emoji.🔥.weight",
    "[bold]markup[/bold]",
    "model." + "layers.0." * 12 + "weight",
    "w" * 1000,
)
"""Keys that attack a terminal, are wide, run from right to left, or are long."""

_TIMES = {
    *("seconds", "age", "quiet", "usual", "peak_memory", "rank_seconds", "timings", "memory_available"),
    "who",
    *("disk_free", "disk_available", "memory_free"),
}
_PATTERNS = (
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|\+00:00| UTC)?", "WHEN"),
    (r"\b[0-9a-f]{64}\b", "DIGEST"),
    (r"\b[0-9a-f]{8}\b", "DIGEST8"),
    # The report's page is among it, which changes with every word of its template.
    (r"around them, [\d,.]+ KiB", "around them, SIZE"),
    (r"(less than )?\b\d[\d,.]* (ms|s|min|h|d)\b( \d+ (s|min|h)\b)?", "TIME"),
    (r"\b[\d,.]+ (MiB|GiB|TiB) (of memory|free|there|available)", r"SIZE \2"),
    # Columns are as wide as what was replaced in them.
    (r"(report\.html +|wrong, )[\d.]+ KiB", r"\1SIZE"),
    (r"__(\d+)_\d{6,}\.distcp", r"__\1_NUMBER.distcp"),
    (r"\b[\d,.]+ [KMG]iB/s", "RATE"),
    (r"\b[\d,.]+ [MG]iB at most", "SIZE at most"),
    (r"\([\d,.]+ KiB, TIME\)", "(SIZE, TIME)"),
    (r" {2,}(TIME|AGE|DIGEST8|PUBLISHED|WHEN)\b", r"  \1"),
    (r"(TIME|AGE|DIGEST8|PUBLISHED|WHEN)\b {2,}", r"\1  "),
)


def settled(text: str, place: Path) -> str:
    """``text`` with a placeholder for everything that is another in the next run."""
    with suppress(ValueError):
        text = json.dumps(_settled(json.loads(text)), indent=2, ensure_ascii=True) + "\n"
    text = text.replace(str(place), "PLACE")
    for pattern, placeholder in _PATTERNS:
        text = re.sub(pattern, placeholder, text)
    return text


def _settled(value: Any) -> Any:
    if isinstance(value, dict):
        # The page of a report holds places and times; a saved file's number has as many digits as it has.
        varying = _TIMES | ({"bytes"} if "verdict" in value else set())
        varying |= {"bytes_written"} if "dropped" in value else set()
        varying |= {"size"} if str(value.get("name")).endswith((".distcp", "report.html")) else set()
        varying |= {"bytes"} if "contradictions" in value else set()
        return {key: "VARIES" if key in varying else _settled(each) for key, each in value.items()}
    return [_settled(each) for each in value] if isinstance(value, list) else value


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: checkpoints ``good``, ``other``, ``cut``, ``torn`` and ``odd``."""
    import torch
    import torch.distributed.checkpoint as checkpoint

    # Paths stand in what is written, and their length in its size.
    tmp_path = tmp_path / ("x" * (160 - len(str(tmp_path))))
    tmp_path.mkdir()
    for name, source in (
        ("good", "torch_tied"),
        ("cut", "torch_tied"),
        ("torn", "torch_tied"),
        ("other", OTHER_KEYS),
    ):
        shutil.copytree(golden.find(source), tmp_path / name)
    data = next((tmp_path / "cut").glob("*.distcp"))
    os.truncate(data, data.stat().st_size // 2)
    (tmp_path / "torn" / ".metadata").write_bytes(b"")
    # A copy keeps the times of the checkout that it was made in.
    for file in tmp_path.glob("*/*"):
        os.utime(file, (0, 1_700_000_000))
    monkeypatch.chdir(tmp_path)
    checkpoint.save(
        {key: torch.ones(2) for key in ODD_KEYS},
        storage_writer=checkpoint.FileSystemWriter("odd"),
        no_dist=True,
    )
    (tmp_path / "rules.toml").write_text('"nothing.*" = "row"\n')
    return tmp_path


@pytest.fixture
def life(place: Path) -> tuple[Path, PassReport]:
    """A run with a good step and three bad ones, after a pass: its settings and what the pass did."""
    life = Lifecycle(str(place / "life"), place / "life")
    life.save("step_1")
    life.save("step_2")
    life.cut("step_2")
    life.save("step_3", OTHER_KEYS)
    life.save("step_4", without=(".metadata",))
    life.save("logs")
    settings = life.settings(expectation="previous", tables="[runs.retire]\nlatest = 1\n")
    report = life.once(settings)
    life.save("step_5")
    return settings.file, report


Call = Callable[[Sequence[str]], Said]


@pytest.fixture
def compare(
    place: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[[str, Call], None]:
    """``compare(name, call)`` holds what ``call`` says in every mode against the file of that name."""

    def compare(name: str, call: Call) -> None:
        parts = []
        for mode, options in (("for a person", []), ("--json", ["--json"]), ("--quiet", ["--quiet"])):
            said = {}
            for width in WIDTHS:
                monkeypatch.setenv("COLUMNS", str(width))
                got = call(options)
                out, err = settled(got.out, place), settled(got.err, place)
                said[width] = f"exit code {got.code}\n--- stdout\n{out}--- stderr\n{err}"
            if len(set(said.values())) == 1:
                parts.append(f"===== {mode}\n{said[WIDTHS[0]]}")
            else:
                assert mode == "for a person", "only tables depend on the width"
                parts += [f"===== {mode}, {width} columns\n{text}" for width, text in said.items()]
        text = "\n".join(parts)
        assert not set(text) & set("\x1b\x07\x9b\u202e\u200b\r\t")
        file = DATA / f"{name}.txt"
        if request.config.getoption("--update-golden"):
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        assert text == file.read_text()

    return compare


Compare = Callable[[str, Call], None]

CHECKPOINT_CASES = {
    "inspect": ["inspect", "good"],
    "inspect-odd-keys": ["inspect", "odd"],
    "inspect-nothing": ["inspect", "nowhere"],
    "validate": ["validate", "good"],
    "validate-cut": ["validate", "cut"],
    "validate-no-index": ["validate", "torn"],
    "validate-other-keys": ["validate", "other", "--against", "good"],
    "validate-odd-keys": ["validate", "odd", "--against", "good"],
    "validate-scrub": ["validate", "good", "--scrub"],
    "test-load": ["test-load", "good", "--layout", "fsdp=2", "--layout", "fsdp=2,tp=2"],
    "test-load-cut": ["test-load", "cut"],
    "test-load-plan": ["test-load", "good", "--plan"],
    "export-cut": ["export", "cut", "out.pt"],
    "contract": ["contract", "good"],
    "diff": ["diff", "good", "other"],
    "diff-same": ["diff", "good", "good", "--values"],
    "diff-odd-keys": ["diff", "good", "odd"],
    "report-nothing": ["report", "nowhere"],
    "usage": ["validate"],
    "usage-option": ["export", "good", "out.pt", "--format", "zip"],
    "listen-refused": ["listen", "--host", "0.0.0.0"],
    "demo-refused": ["demo", "good"],
    "verify-unpublished": ["verify", "good"],
}


@pytest.mark.parametrize("name", CHECKPOINT_CASES)
def test_one_checkpoint(ckpt: Ckpt, compare: Compare, place: Path, name: str) -> None:
    (place / "lifecycle.toml").write_text('publish = "p"\n[[runs]]\nname = "demo"\nsource = "run"\n')
    compare(name, lambda options: ckpt(*CHECKPOINT_CASES[name], *options))


@pytest.mark.parametrize("format", ["torch", "safetensors"])
def test_export_and_import(ckpt: Ckpt, compare: Compare, place: Path, format: str) -> None:
    def export(options: Sequence[str]) -> Said:
        (place / "out.file").unlink(missing_ok=True)
        return ckpt(
            "export",
            "good",
            "out.file" if format == "torch" else "out.safetensors",
            "--format",
            format,
            *options,
        )

    compare(f"export-{format}", export)
    if format == "torch":
        compare(
            "import",
            lambda options: ckpt("import", "out.file", "new", "--overwrite", "--ranks", "2", *options),
        )


def test_report(ckpt: Ckpt, compare: Compare) -> None:
    compare("report", lambda options: ckpt("report", "good", "-o", "page.html", *options))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("status", ["status"]),
        ("watch-idle", ["watch", "--once"]),
        ("retire", ["retire"]),
        ("report-run", ["report", "-o", "run.html"]),
        ("run-of-no-run", ["run", "elsewhere/step_1"]),
    ],
)
def test_a_run(
    ckpt: Ckpt, compare: Compare, life: tuple[Path, PassReport], name: str, arguments: list[str]
) -> None:
    if name == "watch-idle":
        shutil.rmtree(Path("life/train/step_5"))
    compare(name, lambda options: ckpt(*arguments, "--config", life[0], *options))


def test_published(ckpt: Ckpt, compare: Compare, life: tuple[Path, PassReport]) -> None:
    published = str(life[1].steps[0].published)
    compare("verify", lambda options: ckpt("verify", published, "--deep", *options))
    compare("publish-alias", lambda options: ckpt("publish", "--alias", "best", published, *options))
    (Path(published) / "checkpoint.pt").write_bytes(b"damaged")
    compare("verify-damaged", lambda options: ckpt("verify", published, *options))


def test_what_a_pass_and_a_step_say(
    compare: Compare, life: tuple[Path, PassReport], capsys: pytest.CaptureFixture[str]
) -> None:
    """`ckpt watch` and `ckpt run` print so; that they do so through Prefect is tested elsewhere."""
    whole = life[1]

    def said(body: Callable[[Output], int], options: Sequence[str]) -> Said:
        capsys.readouterr()
        code = guarded(body, Output(json="--json" in options, quiet="--quiet" in options), {})
        captured = capsys.readouterr()
        return Said(code, captured.out, captured.err)

    def watched(out: Output) -> int:
        out.report(whole, lambda: show_pass(out, whole), errors=errors_of_pass(whole))
        return whole.exit_code

    def ran(out: Output) -> int:
        out.report(
            whole.steps[1], lambda: show_step(out, whole.steps[1]), errors=errors_of_step(whole.steps[1])
        )
        return 1

    compare("watch", lambda options: said(watched, options))
    compare("run-torn", lambda options: said(ran, options))


def test_help(ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    texts = [ckpt("--help").out] + [
        f"===== ckpt {name} --help\n{ckpt(name, '--help').out}" for name in COMMANDS
    ]
    file = DATA / "help.txt"
    if request.config.getoption("--update-golden"):
        file.write_text("\n".join(texts))
    assert "\n".join(texts) == file.read_text()
