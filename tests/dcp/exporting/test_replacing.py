"""An export over an older one: whatever ends it, one of the two stands whole, and the next run clears up."""

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from dcp.errors import BusyError, ChangedError, NotFoundError, UnreachableError
from dcp.exporting import export, plan_export
from dcp.exporting.safetensors_layout import INDEX
from dcp.storage import Store, open_store
from dcp.storage.uploads import is_bare
from tests.dcp.exporting.stepwise import exporters
from tests.support.gcs import FakeGcs
from tests.support.proxy import Fault, fault_proxy

SIZE = 2_000
USUAL = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def steps(tmp_path: Path) -> list[tuple[str, Tensors]]:
    """Two steps of one model: the same keys, shapes and sizes."""
    made = []
    for number in (1, 2):
        torch.manual_seed(number)
        state = {f"w{key}": torch.randn(20, 20) for key in range(3)}
        url = tmp_path / f"step_{number}"
        save(state, storage_writer=FileSystemWriter(url), no_dist=True)
        made.append((str(url), state))
    return made


@pytest.fixture(params=["local", "gs", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "out")
    return str(request.getfixturevalue(f"{request.param}_bucket"))


def names_in(store: Store) -> set[str]:
    """Names of all that is there, hidden ones too."""
    if "://" not in store.url:
        return {path.name for path in Path(store.url).glob("*")}
    try:
        return {info.name for info in store.objects()} | {name for name, _ in store.unfinished()}
    except NotFoundError:
        return {name for name, _ in store.unfinished()}


def loaded(store: Store) -> Tensors | None:
    """What a loader finds that goes by the index; None where there is none."""
    try:
        places = json.loads(store.read(INDEX, 1 << 20))["weight_map"]
    except NotFoundError:
        return None
    files = {name: load(store.read(name, 1 << 20)) for name in set(places.values())}
    assert sorted(places) == sorted(key for tensors in files.values() for key in tensors)
    return {key: files[name][key] for key, name in places.items()}


def names_of(store: Store) -> set[str]:
    """The index, if there is one, and what it leads to."""
    try:
        return {INDEX, *json.loads(store.read(INDEX, 1 << 20))["weight_map"].values()}
    except NotFoundError:
        return set()


def equal(found: Tensors | None, wanted: Tensors) -> bool:
    return (
        found is not None
        and found.keys() == wanted.keys()
        and all(torch.equal(found[key], tensor) for key, tensor in wanted.items())
    )


def numbers(root: str, first: int = 1) -> Iterator[int]:
    """Steps at which to kill; on S3, where each takes long, every other one."""
    yield from range(first, 60, 2) if root.startswith("s3") else range(1, 60)


@pytest.mark.parametrize("sharded", [False, True], ids=["one-process", "sharded"])
def test_killed_at_every_step(steps: list[tuple[str, Tensors]], root: str, sharded: bool) -> None:
    (old, older), (new, newer) = steps
    dest, store = f"{root}/hf", open_store(f"{root}/hf")
    found = set()
    with exporters() as [exporter]:
        for number in numbers(root, 1 + sharded):
            report = export(old, dest, format="safetensors", max_shard_size=SIZE)
            assert {f"hf/{name}" for name in names_in(store)} == {file.name for file in report.files}
            assert equal(loaded(store), older)
            exporter.start(new, dest, SIZE, sharded=sharded, step=number)
            code = exporter.ended()
            assert code in (0, -9)
            state = loaded(store)
            assert equal(state, older) or equal(state, newer), number
            found.add((code, equal(state, newer)))
            if not code:
                break
        again = export(new, dest, format="safetensors", max_shard_size=SIZE)
    assert found == {(-9, False), (-9, True), (0, True)}
    assert {f"hf/{name}" for name in names_in(store)} == {file.name for file in again.files}


def test_the_first_export_killed_at_every_step(steps: list[tuple[str, Tensors]], root: str) -> None:
    (url, wanted), (other, others) = steps
    dest, store = f"{root}/hf", open_store(f"{root}/hf")
    stood = set()
    with exporters() as [exporter]:
        for number in numbers(root):
            # What it leaves is of other content under the same names.
            exporter.start(other, dest, SIZE, step=number)
            code = exporter.ended()
            state = loaded(store)
            assert state is None or equal(state, others), number
            stood.add(state is not None)
            report = export(url, dest, format="safetensors", max_shard_size=SIZE)
            assert equal(loaded(store), wanted)
            names = names_in(store)
            assert {f"hf/{name}" for name in names} == {file.name for file in report.files}
            assert state is not None or names == {INDEX, *USUAL}
            for name in names:
                store.remove(name)
            if not code:
                break
    assert stood == {False, True}


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["at-first", "at-last"])
def test_an_interruption_leaves_the_older_one(
    steps: list[tuple[str, Tensors]], root: str, share: float
) -> None:
    (old, older), (new, _) = steps
    dest, store = f"{root}/hf", open_store(f"{root}/hf")
    report = export(old, dest, format="safetensors", max_shard_size=SIZE)

    def interrupt(done: int, total: int) -> None:
        if done >= share * total:
            raise KeyboardInterrupt

    for url in (new, old):
        with pytest.raises(KeyboardInterrupt):
            export(url, dest, format="safetensors", max_shard_size=SIZE, progress=interrupt)
        assert {f"hf/{name}" for name in names_in(store)} == {file.name for file in report.files}
        assert equal(loaded(store), older)


@pytest.mark.parametrize("fault", ["503", "lost"])
def test_a_fault_at_any_request(
    steps: list[tuple[str, Tensors]],
    fake_gcs: FakeGcs,
    gs_bucket: str,
    fault: Fault,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store that has broken down from some request on, and one whose answer to it alone is lost."""
    monkeypatch.setattr("dcp.storage.faults._ATTEMPTS", 3)
    monkeypatch.setattr("dcp.storage.faults._FIRST_WAIT", 0.001)
    monkeypatch.setattr("dcp.storage.faults._LONGEST_WAIT", 0.002)
    (old, older), (new, newer) = steps
    dest, store = f"{gs_bucket}/hf", open_store(f"{gs_bucket}/hf")
    arguments: dict[str, Any] = {"format": "safetensors", "max_shard_size": SIZE}
    outcomes = set()
    with fault_proxy(fake_gcs.endpoint) as proxy:
        options = {"endpoint_url": proxy.endpoint}
        for number in numbers(gs_bucket):
            report = export(old, dest, **arguments)
            assert {f"hf/{name}" for name in names_in(store)} == {file.name for file in report.files}
            asked = itertools.count(1)
            proxy.rule = lambda _method, _target: (
                fault if (at := next(asked)) == number or (fault == "503" and at > number) else None  # noqa: B023
            )
            try:
                export(new, dest, **arguments, dest_options=options)
            except UnreachableError:
                outcomes.add("failed")
            else:
                outcomes.add("done")
                assert fault == "lost" or number > 20
            state = loaded(store)
            assert equal(state, older) or equal(state, newer), number
            if next(asked) <= number:
                break
    assert outcomes == ({"done"} if fault == "lost" else {"failed", "done"})
    assert equal(loaded(store), newer)


@pytest.mark.parametrize("kind", ["gs", "s3"])
def test_who_has_lost_the_place_writes_no_index(
    kind: str, steps: list[tuple[str, Tensors]], request: pytest.FixtureRequest
) -> None:
    (old, older), (new, _) = steps
    dest = f"{request.getfixturevalue(f'{kind}_bucket')}/hf"
    store = open_store(dest)
    report = export(old, dest, format="safetensors", max_shard_size=SIZE)

    def take_over(_done: int, _total: int) -> None:
        for name, _ in store.unfinished():
            if is_bare(name):
                store.remove(name)

    with pytest.raises(BusyError, match="may have taken over"):
        export(new, dest, format="safetensors", max_shard_size=SIZE, progress=take_over)
    assert {f"hf/{name}" for name in names_in(store)} == {file.name for file in report.files}
    assert equal(loaded(store), older)


@pytest.mark.parametrize("kind", ["local", "gs"])
def test_a_checkpoint_that_changes_under_an_equal_export(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """What would be written over its equal is not equal any more, and no shard of it may appear."""
    states = [{f"w{n:02}": torch.full((20, 20), float(n + 100 * step)) for n in range(30)} for step in (0, 1)]
    for name, state in zip(("step", "other"), states, strict=True):
        save(state, storage_writer=FileSystemWriter(tmp_path / name), no_dist=True)
    root = str(tmp_path / "out") if kind == "local" else request.getfixturevalue("gs_bucket")
    dest = f"{root}/hf"
    arguments: dict[str, Any] = {"format": "safetensors", "max_shard_size": 1}
    export(str(tmp_path / "step"), dest, **arguments)

    def save_over(_done: int, _total: int) -> None:
        for path in (tmp_path / "other").glob("*.distcp"):
            (tmp_path / "step" / path.name).write_bytes(path.read_bytes())

    with pytest.raises(ChangedError):
        export(str(tmp_path / "step"), dest, **arguments, progress=save_over)
    assert equal(loaded(open_store(dest)), states[0])


def test_names(steps: list[tuple[str, Tensors]], tmp_path: Path) -> None:
    """The usual ones where nothing stands, and an equal export keeps those it has."""
    (old, _), (new, newer) = steps
    dest = tmp_path / "hf"

    def exported(url: str, **options: object) -> list[str]:
        plan = plan_export(url, str(dest), format="safetensors", max_shard_size=SIZE, **options)  # type: ignore[arg-type]
        report = export(url, str(dest), format="safetensors", max_shard_size=SIZE, **options)  # type: ignore[arg-type]
        names = [file.name.removeprefix("hf/") for file in report.files]
        assert sorted(names) == sorted(path.name for path in dest.iterdir())
        assert [(f.name, f.bytes) for f in plan.files] == [(f.name, f.size) for f in report.files]
        return names[:-1]

    assert exported(old) == USUAL
    assert exported(old) == USUAL
    tagged = exported(new)
    assert not set(tagged) & set(USUAL)
    assert exported(new) == tagged
    assert equal(loaded(open_store(str(dest))), newer)
    # One layout in every header, and the same sizes, yet other bytes.
    swapped = exported(new, rename=["^w0$=>w", "^w1$=>w0", "^w$=>w1"])
    half, brain = exported(new, dtype="float16"), exported(new, dtype="bfloat16")
    assert len({*tagged, *swapped, *half, *brain}) == 3 + 3 + len(half) + len(brain)


def test_shards_of_another_program_are_not_written_over(
    steps: list[tuple[str, Tensors]], tmp_path: Path
) -> None:
    """Nor does a damaged index stand in the way."""
    dest = tmp_path / "hf"
    dest.mkdir()
    (dest / USUAL[0]).write_bytes(b"somebody's")

    def fail(_done: int, _total: int) -> None:
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        export(steps[0][0], str(dest), format="safetensors", max_shard_size=SIZE, progress=fail)
    assert (dest / USUAL[0]).read_bytes() == b"somebody's"
    (dest / INDEX).write_text("{")
    report = export(steps[0][0], str(dest), format="safetensors", max_shard_size=SIZE)
    assert {f"hf/{path.name}" for path in dest.iterdir()} == {file.name for file in report.files}
    assert equal(loaded(open_store(str(dest))), steps[0][1])


@pytest.mark.parametrize("kind", ["gs", "s3"])
def test_many_processes_at_once(
    kind: str, steps: list[tuple[str, Tensors]], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Some are refused; what stands in the end is one of them, whole, and nothing of the others."""
    dest = f"{request.getfixturevalue(f'{kind}_bucket')}/hf"
    store = open_store(dest)
    hold = tmp_path / "hold"
    with exporters(3) as all_of_them:
        for _ in range(3):
            for number, exporter in enumerate(all_of_them):
                exporter.start(steps[number % 2][0], dest, SIZE, sharded=number == 2)
            codes = {exporter.ended() for exporter in all_of_them}
            assert codes <= {0, 3}
            state = loaded(store)
            assert (
                equal(state, steps[0][1]) or equal(state, steps[1][1]) or (state is None and 0 not in codes)
            )
            assert names_in(store) == names_of(store)
        hold.touch()
        all_of_them[0].start(steps[0][0], dest, SIZE, hold=str(hold))
        deadline = time.monotonic() + 60
        while not (tmp_path / "hold.reached").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        all_of_them[1].start(steps[1][0], dest, SIZE)
        all_of_them[2].start(steps[1][0], dest, SIZE, sharded=True)
        assert [exporter.ended() for exporter in all_of_them[1:]] == [3, 3]
        hold.unlink()
        assert all_of_them[0].ended() == 0
    assert equal(loaded(store), steps[0][1])
    assert names_in(store) == names_of(store)
