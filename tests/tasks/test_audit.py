"""Audits of what is published: damage is told once, and what cannot be reached is no damage."""

from pathlib import Path
from typing import Any

import pytest

from dcp.errors import UnreachableError
from tasks import audit
from tasks.alert import Alert
from tasks.audit import AuditReport, audit_run
from tests.support.lifecycle import Lifecycle


@pytest.fixture
def life(tmp_path: Path) -> Lifecycle:
    found = Lifecycle(str(tmp_path / "place"), tmp_path / "settings")
    for number in (1, 2, 3):
        found.save(f"step_{number}")
    found.once(found.settings())
    assert len(found.manifests()) == 3
    return found


def _audit(life: Lifecycle, **changed: Any) -> tuple[AuditReport, list[Alert]]:
    told: list[Alert] = []
    arguments = {"deep": False, "newest": None, "options": {}, "sinks": (), "emit": told.append, **changed}
    return audit_run(life.ledger, f"{life.url}/published", **arguments), told


def _artifact(life: Lifecycle, step: str) -> Path:
    [found] = Path(life.published.url).glob(f"{step}/*/checkpoint.pt")
    return found


def test_all_is_well(life: Lifecycle) -> None:
    report, told = _audit(life, deep=True)
    assert report.ok
    assert (report.steps, told) == (3, [])
    assert report.bytes >= sum(_artifact(life, f"step_{n}").stat().st_size for n in (1, 2, 3))


def test_damage_is_told_once(life: Lifecycle) -> None:
    file = _artifact(life, "step_2")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    report, told = _audit(life)
    assert not report.ok
    [alert] = told
    assert (alert.step, alert.problem, alert.event) == ("step_2", "damaged", "checkpoint.damaged")
    assert "checkpoint.pt" in alert.what
    assert alert.command == f"ckpt verify {alert.where}"
    again, told = _audit(life)
    assert [found.step for found in again.damaged] == ["step_2"]
    assert told == []


def test_what_was_removed_is_damage(life: Lifecycle) -> None:
    for path in _artifact(life, "step_1").parent.iterdir():
        path.unlink()
    report, told = _audit(life)
    assert [(alert.step, alert.problem) for alert in told] == [("step_1", "damaged")]
    assert report.steps == 3


def test_the_newest_only(life: Lifecycle) -> None:
    _artifact(life, "step_1").unlink()
    report, told = _audit(life, newest=2)
    assert report.ok
    assert (report.steps, told) == (2, [])


def test_what_cannot_be_reached_is_no_damage(life: Lifecycle, monkeypatch: pytest.MonkeyPatch) -> None:
    real = audit.verify

    def verify(url: str, **options: Any) -> Any:
        if "/step_2/" in url:
            raise UnreachableError("the store did not answer", url)
        return real(url, **options)

    monkeypatch.setattr(audit, "verify", verify)
    report, told = _audit(life)
    assert not report.ok
    assert report.unreachable == ["step_2: the store did not answer"]
    assert (report.damaged, told) == ([], [])
