"""What the export of a step will take: all its artifacts, as fast as those published last were made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tasks.export import ExportRequest, export_step
from tasks.export_plan import measured_rates, plan_step
from tasks.manifest import MANIFEST, Manifest, encode
from tests.support.lifecycle import Lifecycle

REQUESTS = [ExportRequest(), ExportRequest(format="safetensors", name="hf", tie=True)]


def arguments(life: Lifecycle, step: str, requests: list[ExportRequest] = REQUESTS) -> dict[str, Any]:
    return {
        "url": f"{life.source.url}/{step}",
        "destination": f"{life.url}/somewhere/{step}",
        "parts": (),
        "requests": requests,
        "options": {},
        "publish_options": {},
    }


def test_it_is_that_of_all_artifacts(tmp_path: Path) -> None:
    life = Lifecycle(str(tmp_path / "place"), tmp_path)
    life.save("step_1")
    both = plan_step(**arguments(life, "step_1"))
    each = [plan_step(**arguments(life, "step_1", [request])) for request in REQUESTS]
    assert both.memory == max(one.memory for one in each)
    assert both.disk == sum(one.disk for one in each)
    assert both.bytes == sum(one.bytes for one in each)
    made = export_step(**arguments(life, "step_1"))
    assert both.disk >= 0.9 * sum(artifact.bytes_written for artifact in made.artifacts)
    assert not both.measured


def test_time_is_what_was_measured_before(tmp_path: Path) -> None:
    life = Lifecycle(str(tmp_path / "place"), tmp_path)
    assert measured_rates(life.ledger) == {}
    settings = life.settings()
    life.save("step_1")
    life.once(settings)
    [manifest] = life.manifests()
    store = life.published
    text = store.read(manifest, 1 << 20).decode()
    document = json.loads(text)
    [artifact] = document["artifacts"]
    assert artifact["seconds"] > 0
    assert artifact["peak_memory"] > 0
    assert measured_rates(life.ledger) == {"checkpoint.pt": artifact["bytes_read"] / artifact["seconds"]}
    artifact["seconds"] = artifact["bytes_read"] / 500
    store.replace(manifest, encode(Manifest.model_validate(document)))
    rates = measured_rates(life.ledger)
    life.save("step_2")
    need = plan_step(**arguments(life, "step_2", [ExportRequest()]), rates=rates)
    assert need.seconds == round(1 + need.bytes / 500, 1)
    assert need.measured
    mixed = plan_step(**arguments(life, "step_2"), rates=rates)
    assert not mixed.measured
    assert mixed.seconds > need.seconds
    store.replace(manifest, b"nonsense")
    assert manifest.endswith(MANIFEST)
    assert measured_rates(life.ledger) == {}
