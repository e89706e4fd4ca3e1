"""Names, numbers, order and states of steps."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.errors import NotFoundError
from dcp.storage import Store, open_store
from tasks.discover import DEFAULT_PATTERNS, FoundStep, Sighting, compile_pattern, discover, step_number

NOW = 2_000_000_000.0
COMPILED = [compile_pattern(pattern) for pattern in DEFAULT_PATTERNS]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


def write(store: Store, name: str, *, age: float = 10.0) -> None:
    store.replace(name, b"x")
    os.utime(Path(store.url) / name, (NOW - age, NOW - age))


def found(store: Store, **options: Any) -> dict[str, FoundStep]:
    options = {"grace_seconds": 60.0, "now": NOW, **options}
    return {step.name: step for step in discover(store, **options).steps}


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("step_12000", 12000),
        ("step-100", 100),
        ("step100", 100),
        ("steps_7", 7),
        ("iter_0000100", 100),
        ("global_step10", 10),
        ("checkpoint-500", 500),
        ("ckpt_3", 3),
        ("epoch=3-step=100.ckpt", 100),
        ("epoch=3-step=100", 100),
        ("ep1-ba200", 200),
        ("step_0", 0),
        ("step_12000.tmp", None),
        ("old_step_12000", None),
        ("step_", None),
        ("step_-1", None),
        ("step_1_old", None),
        ("step_٣", None),
        ("step_1\n", None),
        (f"step_{'9' * 19}", None),
        (".step_1", None),
        ("latest", None),
        ("12000", None),
    ],
)
def test_names_match_in_full_or_not_at_all(name: str, number: int | None) -> None:
    assert step_number(name, COMPILED) == number


def test_patterns_are_configurable() -> None:
    mine = [compile_pattern(r"(?:[a-z]+)@(?P<step>\d+)(k)?"), compile_pattern(r"v(\d+)")]
    assert step_number("run@12", mine) == 12
    assert step_number("run@12k", mine) == 12
    assert step_number("v3", mine) == 3
    assert step_number("step_1", mine) is None
    assert step_number("../12", [compile_pattern(r".*?(\d+)")]) is None
    assert step_number("x12y", [compile_pattern(r"x(.*)")]) is None


@pytest.mark.parametrize("text", ["(", "step", r"(\d+)-(\d+)", r"step_(?:\d+)"])
def test_a_pattern_needs_one_number(text: str) -> None:
    with pytest.raises(ValueError, match=r"regular expression|group for the number"):
        compile_pattern(text)


@given(st.text())
def test_no_name_breaks_it(name: str) -> None:
    number = step_number(name, COMPILED)
    assert number is None or number >= 0


def test_steps_come_in_the_order_of_their_numbers(store: Store) -> None:
    for name in ("step_10", "step_9", "step_100", "step-9", "logs", "step_1.tmp"):
        write(store, f"{name}/.metadata")
    write(store, "notes.txt")
    discovery = discover(store, grace_seconds=60, now=NOW)
    assert [step.name for step in discovery.steps] == ["step-9", "step_9", "step_10", "step_100"]
    assert discovery.unknown == ("logs", "step_1.tmp")


def test_a_step_without_index_is_writing_until_it_has_come_to_rest(store: Store) -> None:
    write(store, "step_1/__0_0.distcp", age=59)
    write(store, "step_2/__0_0.distcp", age=61)
    write(store, "step_3/__0_0.distcp", age=6100)
    write(store, "step_3/__1_0.distcp", age=59)
    write(store, "step_4/__0_0.distcp", age=61)
    write(store, "step_4/.metadata", age=1)
    states = {name: step.progress for name, step in found(store).items()}
    assert states == {"step_1": "writing", "step_2": "incomplete", "step_3": "writing", "step_4": "committed"}
    step = found(store)["step_3"]
    assert step.quiet == pytest.approx(59)
    assert (step.missing, step.bytes) == ((".metadata",), 2)


def test_a_clock_that_runs_ahead_is_not_believed(store: Store) -> None:
    write(store, "step_1/__0_0.distcp", age=-7200)
    assert found(store)["step_1"].progress == "writing"
    assert found(store)["step_1"].quiet is None
    listing = found(store)["step_1"].survey.listing_identity
    for seconds, progress in ((59, "writing"), (61, "incomplete")):
        seen = [Sighting(listing, NOW - seconds, 1, NOW + 7200)]
        assert found(store, sightings=lambda _, seen=seen: seen)["step_1"].progress == progress
    other = [Sighting("another", NOW - 61, 1, NOW + 7200)]
    assert found(store, sightings=lambda _: other)["step_1"].progress == "writing"
    write(store, "step_2/__0_0.distcp", age=-3)
    assert found(store)["step_2"].quiet == 0


def test_an_empty_directory_is_a_step_that_nobody_can_date(store: Store) -> None:
    (Path(store.url) / "step_1").mkdir()
    assert found(store)["step_1"].progress == "writing"
    listing = found(store)["step_1"].survey.listing_identity
    seen = [Sighting(listing, NOW - 61, 0, None)]
    assert found(store, sightings=lambda _: seen)["step_1"].progress == "incomplete"


def test_a_step_that_only_lost_objects_is_being_removed(store: Store) -> None:
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        write(store, f"step_1/{name}", age=5000)
    whole = found(store)["step_1"].survey
    known = [Sighting(whole.listing_identity, NOW - 4000, 3, whole.last_change)]
    assert found(store, sightings=lambda _: known)["step_1"].progress == "committed"
    store.remove("step_1/__1_0.distcp")
    step = found(store, sightings=lambda _: known)["step_1"]
    assert (step.progress, step.quiet) == ("writing", None)
    less = step.survey.listing_identity
    for seconds, progress in ((59, "writing"), (61, "committed")):
        both = [*known, Sighting(less, NOW - seconds, 2, whole.last_change)]
        assert found(store, sightings=lambda _, both=both: both)["step_1"].progress == progress
    # Written again meanwhile, it is judged at once.
    write(store, "step_1/__0_0.distcp", age=1)
    assert found(store, sightings=lambda _: known)["step_1"].progress == "committed"


def test_the_empty_directory_of_a_removed_step_is_no_step(store: Store) -> None:
    (Path(store.url) / "step_1").mkdir()
    assert found(store, sightings=lambda _: [Sighting("whole", NOW - 4000, 3, NOW - 5000)]) == {}


def test_what_only_has_a_steps_name_is_no_step(store: Store) -> None:
    write(store, "step_1/.metadata")
    write(store, "step_2")
    write(store, "notes.txt")
    root = Path(store.url)
    (root / "step_3").symlink_to(root / "nowhere")
    (root / "latest").symlink_to(root / "nowhere")
    (root / "step_4").symlink_to("step_4")
    (root / "step_5").symlink_to(root / "step_1")
    discovery = discover(store, grace_seconds=60, now=NOW)
    assert [step.name for step in discovery.steps] == ["step_1", "step_5"]
    assert discovery.unknown == ("step_2", "step_3", "step_4")


def test_required_parts_must_all_be_there(store: Store) -> None:
    write(store, "step_1/model/.metadata", age=61)
    write(store, "step_1/optim/__0_0.distcp", age=61)
    write(store, "step_2/model/.metadata", age=61)
    write(store, "step_2/optim/.metadata", age=61)
    write(store, "step_3/.metadata", age=61)
    steps = found(store, parts=["model", "optim"])
    assert {name: step.progress for name, step in steps.items()} == {
        "step_1": "incomplete",
        "step_2": "committed",
        "step_3": "incomplete",
    }
    assert steps["step_1"].missing == ("optim/.metadata",)
    # Without being told, a part that has begun is waited for.
    assert {name: step.progress for name, step in found(store).items()} == {
        "step_1": "incomplete",
        "step_2": "committed",
        "step_3": "committed",
    }


def test_a_rank_local_save_is_committed_once_it_rests(store: Store) -> None:
    write(store, "step_1/__0.metadata", age=10)
    write(store, "step_1/__0_0.distcp", age=10)
    assert found(store)["step_1"].progress == "writing"
    assert found(store, grace_seconds=5)["step_1"].progress == "committed"


def test_other_formats_are_told_apart_once_they_rest(store: Store) -> None:
    write(store, "step_1/model_world_size_2_rank_0.pt", age=30)
    assert found(store)["step_1"].progress == "writing"
    assert found(store, grace_seconds=5)["step_1"].progress == "not-dcp"


def test_no_source_is_an_error_and_not_an_empty_list(store: Store) -> None:
    with pytest.raises(NotFoundError):
        discover(open_store(f"{store.url}/nowhere"), grace_seconds=60, now=NOW)


def test_hostile_names_are_no_steps(store: Store) -> None:
    write(store, "step_1\n/.metadata")
    write(store, "step_2/.metadata")
    assert list(found(store, patterns=[r"step_(\d+)\s*"])) == ["step_2"]


def test_a_name_that_is_no_utf8_can_be_reported(store: Store) -> None:
    write(store, "step_1/.metadata")
    Path(store.url, "step_\udcff2").mkdir()
    listed = discover(store, grace_seconds=60.0, now=NOW)
    assert [step.name for step in listed.steps] == ["step_1"]
    assert listed.unknown == ("step_\\udcff2",)


def test_what_is_no_step_is_not_looked_into(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the `lost+found` of a disk, which only root may list."""
    write(store, "step_1/.metadata")
    write(store, "lost+found/sub/file")
    scandir = os.scandir

    def closed(path: os.PathLike[str]) -> Any:
        if "lost+found" in os.fspath(path):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    listed = discover(store, grace_seconds=60.0, now=NOW)
    assert [step.name for step in listed.steps] == ["step_1"]
    assert listed.unknown == ("lost+found",)
