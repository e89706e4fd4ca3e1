"""What `watch` and `status` say of alerts that nobody took and of stages that failed."""

from pathlib import Path

import pytest

from flows.cli.lifecycle_views import show_pass
from flows.cli.output import Output
from tests.flows.cli.ckpt import Ckpt
from tests.support.lifecycle import Lifecycle
from tests.support.web import webhook


@pytest.fixture
def here(tmp_path: Path) -> Lifecycle:
    return Lifecycle(str(tmp_path / "place"), tmp_path / "settings")


def test_an_alert_that_is_refused_again_is_not_called_sent(
    here: Lifecycle, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.sinks._TRIES", 1)

    def watched() -> str:
        capsys.readouterr()
        out = Output()
        show_pass(out, here.once(settings))
        out.flush()
        return capsys.readouterr().out

    with webhook() as sink:
        sink.broken = True
        settings = here.settings('resend_after = "0s"', alerts=[sink.url])
        here.save("step_1", without=(".metadata",))
        assert "(failed: " in watched()
        refused = watched()
        assert "alert not delivered: incomplete of step_1 to json://127.0.0.1" in refused
        assert "had failed before" not in refused
        sink.broken = False
        assert "1 alert delivered that had failed before" in watched()
        assert "alert" not in watched()


def test_a_failed_stage_does_not_read_as_one_at_work(ckpt: Ckpt, here: Lifecycle) -> None:
    here.save("step_1")
    settings = here.settings(max_attempts=1, tables="[[runs.exports]]\nmemory_budget = 1\n")
    here.once(settings)
    shown = ckpt("status", "--config", settings.file).out
    assert "step_1  export-failed  ok" in shown
    assert "  export-failed told " in shown
