"""The progress of an export on a real Prefect API; one that is away neither delays nor fails anything."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.objects import Artifact
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks import progress
from tasks.artifacts import artifact_key
from tasks.export import ExportRequest, export_step
from tasks.prefect_tasks import call_as_task
from tasks.progress import ProgressArtifact
from tests.support.train import SavedCheckpoint


async def artifacts(key: str) -> list[Artifact]:
    async with get_client() as client:
        return await client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])),
        )


@pytest.mark.usefixtures("prefect_api")
def test_an_export_in_a_flow_shows_its_progress(fsdp2_checkpoint: SavedCheckpoint, tmp_path: Path) -> None:
    step = tmp_path / "progress-run" / "step_7"
    step.parent.mkdir()
    step.symlink_to(fsdp2_checkpoint.path)

    @flow
    def exporting() -> int:
        report = call_as_task(
            export_step,
            str(step),
            str(tmp_path / "published"),
            parts=(),
            requests=[ExportRequest(), ExportRequest(format="safetensors", name="hf")],
            options={},
            publish_options={},
        )
        return len(report.artifacts)

    assert exporting() == 2
    [artifact] = asyncio.run(artifacts("progress-run-export-progress"))
    assert (artifact.type, artifact.data) == ("progress", 100.0)
    assert artifact.task_run_id is not None
    assert artifact.flow_run_id is not None
    assert artifact.description is not None
    assert re.match(
        r"export of progress-run/step_7: (\d+\.\d\d) of \1 [kM]B of artifact 2 at [\d.e+]+ MB/s$",
        artifact.description,
    )


@pytest.mark.usefixtures("prefect_api")
def test_it_is_updated_while_the_export_runs() -> None:
    @flow
    def slowly() -> list[float]:
        seen: list[float] = []
        with ProgressArtifact("export of slow/step_1", every=0.1) as told:
            for done in range(5):
                told(done * 10**9, 8 * 10**9)
                time.sleep(0.4)
                seen += [float(a.data) for a in asyncio.run(artifacts(artifact_key("export of slow/step_1")))]  # type: ignore[arg-type]
        return seen

    seen = slowly()
    assert seen == sorted(seen)
    assert len(set(seen)) >= 3
    [artifact] = asyncio.run(artifacts(artifact_key("export of slow/step_1")))
    assert artifact.data == 50.0
    assert "4.00 of 8.00 GB at " in str(artifact.description)
    assert str(artifact.description).endswith(" s left")


def test_an_api_that_never_answers_holds_up_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LAST_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        with temporary_settings({PREFECT_API_URL: url}):
            started = time.monotonic()
            with ProgressArtifact("silent", every=0.05) as told:
                for done in range(100):
                    told(done, 100)
                assert time.monotonic() - started < 10
            assert time.monotonic() - started < 20
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_an_api_that_fails_is_missed_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("nobody there")

    monkeypatch.setattr("prefect.artifacts.create_progress_artifact", refuse)
    with ProgressArtifact("away", every=0.01) as told:
        for done in range(20):
            told(done, 20)
            time.sleep(0.01)
    assert [r.getMessage() for r in caplog.records if r.name == "tasks.progress"] == [
        "the progress of away cannot be shown: nobody there"
    ]
