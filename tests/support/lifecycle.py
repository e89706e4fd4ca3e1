"""A run whose steps are copies of golden checkpoints, anywhere, and the settings that watch it."""

import json
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dcp.storage import Store, open_store
from flows.passes import PassReport, run_pass
from flows.settings import LifecycleSettings, load_settings
from tasks.alert import Alert
from tasks.ledger import Ledger
from tests.support import golden
from tests.support.passes import process_directly

RUN = "demo"

SMALL = "torch_tied"
"""A golden of 20 kB."""
OTHER_KEYS = "torch_sharded_tensor_t2.3.1"
"""Another one with other keys."""


@dataclass
class Lifecycle:
    """A source and a publish root below `url`, and a settings file in `directory`."""

    url: str
    directory: Path
    told: list[Alert] = field(default_factory=list)
    """Alerts whose Prefect event would have been emitted."""

    @property
    def source(self) -> Store:
        return open_store(f"{self.url}/train")

    @property
    def published(self) -> Store:
        """The run's directory below the publish root."""
        return open_store(f"{self.url}/published").child(RUN)

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.published, RUN)

    def settings(self, top: str = "", tables: str = "", **run: Any) -> LifecycleSettings:
        """Write the settings file and load it; by default a step is at rest at once and not test-loaded.

        `top` goes before the run's table, `tables` after it.
        """
        values = {"grace_period": "0s", "layouts": [], "expectation": "none", **run}
        lines = [
            top,
            "[[runs]]",
            f'name = "{RUN}"',
            f'source = "{self.source.url}"',
            f'publish = "{self.url}/published"',
        ]
        # JSON's strings, numbers, lists and booleans are TOML's too.
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        self.directory.mkdir(parents=True, exist_ok=True)
        file = self.directory / "lifecycle.toml"
        file.write_text("\n".join([*lines, tables]))
        return load_settings(file)

    def save(self, step: str, name: str = SMALL, *, without: tuple[str, ...] = ()) -> None:
        """Save a golden as `step`, the index last; `without` names files to leave out."""
        root = golden.find(name)
        files = sorted(path for path in root.rglob("*") if path.is_file())
        for path in sorted(files, key=lambda path: path.name == ".metadata"):
            relative = path.relative_to(root).as_posix()
            if relative not in without:
                self.source.replace(f"{step}/{relative}", path.read_bytes())

    def cut(self, step: str) -> None:
        """Cut the end off one of the step's data files, as a broken upload would."""
        name = next(o.name for o in self.source.objects() if o.name.startswith(f"{step}/__"))
        data = self.source.read(name, 1 << 30)
        self.source.replace(name, data[: len(data) // 2])

    def save_good_and_bad(self) -> None:
        """Two good steps that hold the same, `step_1` and `step_2`, then an unfinished one and a torn one."""
        self.save("step_1")
        self.save("step_2")
        self.save("step_3", without=(".metadata",))
        self.save("step_4")
        self.cut("step_4")

    def once(self, settings: LifecycleSettings) -> PassReport:
        """One pass without Prefect."""
        return run_pass(settings, process_directly(settings, emit=self.told.append), emit=self.told.append)

    def records(self, step: str) -> list[set[str]]:
        """Names of the records of each fingerprint of a step."""
        return [set(names) for names in self.ledger.keys(step).values()]

    def manifests(self) -> list[str]:
        """Names of all manifests, relative to the run's directory."""
        return [o.name for o in self.published.objects() if o.name.endswith("/manifest.json")]


def outcomes(report: PassReport) -> dict[str, str]:
    """What became of each step that was worked on: its problem or its outcome."""
    return {step.step: step.problem or step.outcome for step in report.steps}


def anywhere(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty prefix on `local`, `memory`, `gs` or `s3`."""
    match kind:
        case "local":
            return str(tmp_path / "place")
        case "memory":
            bucket = f"memory://bucket-{uuid.uuid4().hex}"
            # In memory a bucket comes into being with its first object.
            open_store(bucket).replace("other", b"")
            return f"{bucket}/place"
        case "gs":
            return str(request.getfixturevalue("gs_bucket")) + "/place"
    return str(request.getfixturevalue("s3_bucket")) + "/place"


class CrashError(BaseException):
    """The worker died here: nothing that catches `Exception` may go on."""
