"""Artifacts are sent beside the work: valid keys, nothing delayed or failed where the API is away."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.objects import Artifact
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks import artifacts
from tasks.artifacts import Artifacts, artifact_key


@given(st.lists(st.text(), min_size=1, max_size=3))
def test_a_key_is_one_that_prefect_takes(words: list[str]) -> None:
    key = artifact_key(*words)
    assert re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", key)
    assert len(key) <= 70


def test_keys_stay_readable_and_apart() -> None:
    assert artifact_key("llama-7b", "validate") == "llama-7b-validate"
    assert artifact_key("Llama", "validate") == "llama-validate"
    assert len({artifact_key("a_b"), artifact_key("a.b"), artifact_key("a-b"), artifact_key("a--b")}) == 4


async def read(key: str) -> list[Artifact]:
    async with get_client() as client:
        return await client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))


@pytest.mark.usefixtures("prefect_api")
def test_each_kind_arrives_and_belongs_to_the_run() -> None:
    @flow
    def showing() -> None:
        with Artifacts() as shown:
            shown.markdown("kinds-markdown", "# x", "a page")
            shown.table("kinds-table", [{"a": "1"}], "a table")
            shown.link("kinds-link", "https://example.org/", "there", "a link")

    showing()
    for key, kind in (("kinds-markdown", "markdown"), ("kinds-table", "table"), ("kinds-link", "markdown")):
        [artifact] = asyncio.run(read(key))
        assert artifact.type == kind
        assert artifact.flow_run_id is not None


def test_an_api_that_never_answers_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "LAST_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        with temporary_settings({PREFECT_API_URL: url}):
            started = time.monotonic()
            with Artifacts() as shown:
                for number in range(50):
                    shown.markdown("silent", str(number), "")
                assert time.monotonic() - started < 10
            assert time.monotonic() - started < 20


def test_an_api_that_fails_is_missed_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("nobody there")

    monkeypatch.setattr("prefect.artifacts.create_markdown_artifact", refuse)
    with caplog.at_level(logging.WARNING), Artifacts() as shown:
        for _ in range(5):
            shown.markdown("away", "", "")
    said = [record.getMessage() for record in caplog.records if record.name == "tasks.artifacts"]
    assert said == ["artifacts cannot be shown: nobody there"]
