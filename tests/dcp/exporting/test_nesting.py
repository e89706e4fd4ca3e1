"""An exported state is what was saved before torch flattened it, as far as that can be known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from dcp.exporting import export
from tests.dcp.exporting.test_export import same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Make = Callable[..., torch.optim.Optimizer]


def trained(make: Make, model: torch.nn.Module | None = None) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(1)
    model = model or torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
    optimizer = make(model.parameters())
    for _ in range(2):
        sum(p.square().sum() for p in model.parameters()).backward()
        optimizer.step()
    return model, optimizer


def exported(tmp_path: Path, state: dict[str, Any], **options: Any) -> tuple[Any, list[Any]]:
    save(state, storage_writer=FileSystemWriter(tmp_path / "step_1"), no_dist=True)
    report = export(str(tmp_path / "step_1"), str(tmp_path / "out.pt"), **options)
    return torch.load(tmp_path / "out.pt", weights_only=True), report.findings


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.Adagrad([{"params": [p], "lr": 0.1} for p in parameters]),
    ],
)
@pytest.mark.parametrize("place", ["optim", None])
def test_an_optimizers_state_is_numbered_again(make: Make, place: str | None, tmp_path: Path) -> None:
    _, optimizer = trained(make)
    before = optimizer.state_dict()
    after, findings = exported(tmp_path, {place: before} if place else before)
    loaded = after[place] if place else after
    assert same(before, loaded)
    assert [type(key) for key in loaded["state"]] == [int] * 12
    assert findings == []
    _, fresh = trained(make)
    fresh.load_state_dict(loaded)
    assert same(before, fresh.state_dict())


def test_numbers_survive_renaming_and_a_selection_without_groups(tmp_path: Path) -> None:
    _, optimizer = trained(torch.optim.AdamW)
    state = {"run": {"optim": optimizer.state_dict()}}
    after, _ = exported(tmp_path, state, include=["*.state.*"], rename=["^run.optim=>adam"])
    assert same(after, {"adam": {"state": optimizer.state_dict()["state"]}})


def test_names_that_look_like_numbers_stay_names(tmp_path: Path) -> None:
    model, optimizer = trained(
        torch.optim.AdamW, torch.nn.ParameterList(torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    )
    before = {"optim": get_optimizer_state_dict(model, optimizer)}
    after, _ = exported(tmp_path, before)
    assert set(before["optim"]["state"]) == {"0", "1", "2"}
    assert same(before, after)


def test_only_listed_numbers_of_a_state_are_integers(tmp_path: Path) -> None:
    before = {
        "o": {
            "param_groups": [{"params": [0, 10]}],
            "state": {0: {"m": torch.ones(1)}, 10: {"m": torch.ones(2)}, "7": {"m": torch.ones(3)}},
        },
        "own": {"state": {"0": torch.zeros(1)}},
        "layers": {"0": torch.ones(1), "1": torch.ones(2)},
        "list": [torch.ones(1), {"0": torch.ones(2)}],
    }
    after, _ = exported(tmp_path, before)
    assert same(before, after)


def test_groups_that_cannot_be_read_leave_keys_as_they_are(tmp_path: Path) -> None:
    import dcp

    _, optimizer = trained(torch.optim.AdamW)
    exported(tmp_path, optimizer.state_dict())
    entry = dcp.read_index(str(tmp_path / "step_1")).entries["param_groups.0.params"]
    assert entry.record is not None  # type: ignore[union-attr]
    file = tmp_path / "step_1" / entry.record.path  # type: ignore[union-attr]
    data = bytearray(file.read_bytes())
    data[entry.record.offset + 5 : entry.record.offset + 40] = bytes(35)  # type: ignore[union-attr]
    file.write_bytes(data)
    out = tmp_path / "state.pt"
    export(str(tmp_path / "step_1"), str(out), include=["state.*"])
    assert set(torch.load(out, weights_only=True)["state"]) == {str(n) for n in range(12)}


def test_a_schedulers_milestones_are_numbered_again(tmp_path: Path) -> None:
    _, optimizer = trained(torch.optim.AdamW)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5, 5])
    before = {"sched": scheduler.state_dict(), "mine": {"milestones": {"1": 2}}}
    after, _ = exported(tmp_path, before)
    assert after["sched"]["milestones"] == {3: 1, 5: 2}
    assert same({**before["sched"], "milestones": {3: 1, 5: 2}}, after["sched"])
    assert after["mine"] == before["mine"]
    scheduler.load_state_dict(after["sched"])
    rates = []
    for _ in range(4):
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    assert rates == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4])


def test_empty_dicts_that_leave_a_gap_are_told(tmp_path: Path) -> None:
    state = {
        "l": [{"a": torch.ones(1)}, {}, [{}, {}], {"a": torch.ones(2)}],
        "m": {"gone": {}, "kept": [], "x": torch.ones(1)},
    }
    after, findings = exported(tmp_path, state)
    assert [f.code for f in findings] == ["export.dropped-empty"]
    assert (findings[0].key, findings[0].detail) == ("l", {"positions": [1, 2], "count": 2})
    assert same(
        after, {"l": [state["l"][0], None, None, state["l"][3]], "m": {"kept": [], "x": torch.ones(1)}}
    )
    _, none = exported(tmp_path, state, include=["m.*"])
    assert none == []


def test_an_optimizer_without_state_is_told(tmp_path: Path) -> None:
    _, optimizer = trained(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    after, findings = exported(tmp_path, {"o": optimizer.state_dict()})
    assert [(f.code, f.severity, f.key) for f in findings] == [("export.dropped-empty", "warning", "o.state")]
    optimizer.load_state_dict(after["o"] | {"state": {}})
    _, none = exported(tmp_path, {"o": optimizer.state_dict(), "x": torch.ones(1)}, include=["x"])
    assert none == []


def test_items_of_a_list_that_are_not_selected_are_told(tmp_path: Path) -> None:
    state = {"l": [torch.ones(1), torch.ones(2), torch.ones(3)], "x": torch.ones(1)}
    after, findings = exported(tmp_path, state, exclude=["l.0", "l.1"])
    assert same(after, {"l": [None, None, state["l"][2]], "x": state["x"]})
    assert [(f.code, f.severity, f.key) for f in findings] == [("export.list-gap", "warning", "l")]
    assert findings[0].detail == {"positions": [0, 1], "count": 2}
    for given in ({"exclude": ["l.2"]}, {"include": ["x"]}, {"exclude": ["l.*"]}):
        assert exported(tmp_path, state, **given)[1] == []
