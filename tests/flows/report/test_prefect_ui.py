"""Prefect's own UI, in a real browser, shows the artifacts of a real run."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from prefect import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.client.schemas.objects import Artifact

from flows.passes import watch_once
from flows.prefect_server import shown_ui
from flows.settings import load_settings
from tests.support.lifecycle import Lifecycle, outcomes
from tests.support.tools import browser_program, required

RUN = "shown"

LOOK = """
import json, sys
from playwright.sync_api import sync_playwright
ran = []
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=sys.argv[1], args=["--no-sandbox"])
    page = browser.new_page()
    page.on("dialog", lambda dialog: ran.append(dialog.message))
    for url, texts in json.loads(sys.argv[2]).items():
        page.goto(url)
        for text in texts:
            page.get_by_text(text).first.wait_for(timeout=30_000)
    browser.close()
print(ran or "nothing was run")
"""
# In a process of its own: playwright keeps an event loop in its thread, beside which Prefect cannot work.


async def _artifacts() -> dict[tuple[str, str], Artifact]:
    """The artifacts of the run's steps, by key and step."""
    async with get_client() as client:
        found = await client.read_artifacts(limit=200)
        steps = await client.read_flow_runs(
            flow_run_filter=FlowRunFilter(name=FlowRunFilterName(like_=f"{RUN}-step_")), limit=50
        )
    step_of = {run.id: run.name.partition("-")[2] for run in steps}
    return {(str(a.key), step_of[a.flow_run_id]): a for a in found if a.flow_run_id in step_of}


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_api")
def test_the_ui_shows_what_came_of_each_stage(tmp_path: Path) -> None:
    program = required(browser_program())
    life = Lifecycle(str(tmp_path / "place"), tmp_path / "settings")
    life.save("step_1")
    checkpoint.save(
        {key: torch.ones(2) for key in ("<script>alert(1)</script>", "[x](javascript:alert(1))", "a|b`c")},
        storage_writer=checkpoint.FileSystemWriter(tmp_path / "place" / "train" / "step_2"),
        no_dist=True,
    )
    file = life.settings(layouts=["fsdp=2"], expectation="previous").file
    file.write_text(file.read_text().replace('name = "demo"', f'name = "{RUN}"'))
    assert outcomes(watch_once(load_settings(file))) == {
        "step_1": "published",
        "step_2": "key-mismatch",
    }
    found = asyncio.run(_artifacts())
    stages = ("validate", "test-load", "export", "publish", "findings", "report")
    assert {key for key, step in found if step == "step_1"} == {
        *(f"{RUN}-{stage}" for stage in stages),
        "train-export-progress",
    }
    assert {key for key, step in found if step == "step_2"} == {f"{RUN}-validate", f"{RUN}-findings"}
    pages = {
        ("validate", "step_1"): ["committed, ok", "Fingerprint"],
        ("test-load", "step_1"): ["fsdp=2"],
        ("export", "step_1"): ["checkpoint.pt"],
        ("publish", "step_1"): ["ckpt verify"],
        ("report", "step_1"): ["report.html"],
        ("validate", "step_2"): ["committed, not ok", "[x](javascript:alert(1))", "Next"],
        ("findings", "step_2"): ["keys.unexpected", "<script>alert(1)</script>"],
    }
    with shown_ui() as ui:
        wanted = {
            f"{ui}/artifacts/artifact/{found[f'{RUN}-{key}', step].id}": texts
            for (key, step), texts in pages.items()
        }
        done = subprocess.run(
            [sys.executable, "-c", LOOK, str(program), json.dumps(wanted)],
            capture_output=True,
            text=True,
            timeout=200,
        )
    assert (done.returncode, done.stdout.strip()) == (0, "nothing was run"), done.stderr
