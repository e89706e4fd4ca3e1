"""The flows that people start from Prefect's UI, and the weekly audit, on a real Prefect API."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prefect import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.objects import State

from flows.artifact_pages import code
from flows.audit import audit_published
from flows.on_demand import ExportOptions, export_checkpoint, validate_checkpoint
from tests.support.lifecycle import Lifecycle

pytestmark = pytest.mark.usefixtures("prefect_api")


@pytest.fixture
def life(tmp_path: Path) -> Lifecycle:
    found = Lifecycle(str(tmp_path / "place"), tmp_path / "settings")
    found.save("step_1")
    found.save("step_2")
    found.cut("step_2")
    found.settings()
    return found


def _config(life: Lifecycle) -> str:
    return str(life.directory / "lifecycle.toml")


def _artifact(key: str) -> str:
    """The newest artifact of this key."""

    async def read() -> str:
        async with get_client() as client:
            only = ArtifactFilter(key=ArtifactFilterKey(any_=[key]))
            [found] = (await client.read_artifacts(artifact_filter=only, sort="CREATED_DESC", limit=1))[:1]
            return str(found.data)

    return asyncio.run(read())


def _validate(life: Lifecycle, url: str, **options: Any) -> State[Any]:
    return validate_checkpoint(url, config=_config(life), return_state=True, **options)


def test_validation_says_what_is_wrong(life: Lifecycle) -> None:
    good = _validate(life, f"{life.source.url}/step_1")
    assert (good.name, good.message) == ("Completed", "committed: 0 errors, 0 other findings")
    bad = _validate(life, f"{life.source.url}/step_2", scrub=True)
    assert bad.is_completed()
    assert bad.name == "Bad"
    assert bad.message is not None
    assert bad.message.startswith("torn: 1 error,")
    text = _artifact("checkpoint-validation")
    assert "`files.truncated`" in text
    assert "step_2" in text


def test_names_are_shown_as_in_all_other_artifacts(life: Lifecycle) -> None:
    name = "\u05e9\u05dc\u05d5\u05dd`<b>\u202etxt"
    life.save(name)
    _validate(life, f"{life.source.url}/{name}")
    title = _artifact("checkpoint-validation").splitlines()[0]
    assert title == f"# validation of {code(f'{life.source.url}/{name}')}"
    assert "\u202e" not in title
    assert f"\u200e{name[:4]}\u200e" in title


def test_a_checkpoint_of_no_run_is_validated_too(life: Lifecycle, golden: Any) -> None:
    assert _validate(life, str(golden("torch_fsdp_tp_2x2"))).name == "Completed"


def test_what_is_not_there_is_a_failed_run(life: Lifecycle) -> None:
    assert _validate(life, f"{life.source.url}/step_9").is_failed()


def test_an_export(life: Lifecycle, tmp_path: Path) -> None:
    state = export_checkpoint(
        f"{life.source.url}/step_1",
        str(tmp_path / "out"),
        "tensors",
        ExportOptions(format="safetensors", max_shard_size="1MB"),
        config=_config(life),
        return_state=True,
    )
    assert state.name == "Completed"
    assert (tmp_path / "out/tensors/model.safetensors.index.json").exists()
    assert "model-00001-of-00001.safetensors" in _artifact("checkpoint-export")


def test_an_export_of_damage_is_refused(life: Lifecycle, tmp_path: Path) -> None:
    state = export_checkpoint(
        f"{life.source.url}/step_2", str(tmp_path / "out"), config=_config(life), return_state=True
    )
    assert state.name == "Bad"
    assert not (tmp_path / "out").exists()


def test_sizes_that_are_none_are_said(life: Lifecycle, tmp_path: Path) -> None:
    state = export_checkpoint(
        f"{life.source.url}/step_1",
        str(tmp_path / "out"),
        options=ExportOptions(memory_budget="plenty"),
        config=_config(life),
        return_state=True,
    )
    assert state.is_failed()
    assert "memory_budget: 'plenty' is no size" in str(state.message)


def test_an_audit_tells_of_damage(life: Lifecycle) -> None:
    life.once(life.settings())
    [report] = audit_published(config=_config(life))
    assert (report.ok, report.steps) == (True, 1)
    [artifact] = Path(life.published.url).glob("step_1/*/checkpoint.pt")
    artifact.write_bytes(artifact.read_bytes()[:-1])
    [report] = audit_published(config=_config(life))
    assert not report.ok
    assert [alert.problem for alert in report.alerts] == ["damaged"]
    assert any("alerted" in records for records in life.records("step_1"))
