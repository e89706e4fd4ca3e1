"""Real workers that are killed or raced, and what must be true when the dust has settled."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from flows.settings import LifecycleSettings
from tasks.leases import PREFIX
from tasks.publish import current_alias, verify
from tests.support.lifecycle import Lifecycle

Victim = Literal["worker", "export", "watcher"]
"""``worker``: a pass without Prefect, at any moment. ``export``: the same, while files are being exported.
``watcher``: a pass as Prefect flows."""

_PASS = """
import sys
from flows.passes import run_pass
from flows.settings import load_settings
from tests.support.passes import process_directly
settings = load_settings(sys.argv[1])
print("ready", flush=True)
"""
_CODE: dict[Victim, str] = {
    "worker": _PASS + "run_pass(settings, process_directly(settings))",
    "export": _PASS + "run_pass(settings, process_directly(settings))",
    "watcher": """
import sys
from flows.settings import load_settings
from flows.watch import watch_in_flow
settings = load_settings(sys.argv[1])
print("ready", flush=True)
watch_in_flow(settings)
""",
}

_RACER = """
import sys
from flows.passes import run_pass
from flows.settings import load_settings
from tests.support.passes import process_directly
settings = load_settings(sys.argv[1])
print("ready", flush=True)
for _ in sys.stdin:
    report = run_pass(settings, process_directly(settings))
    print(report.model_dump_json(), flush=True)
"""


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a process of the project's own needs."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(extra or {})}


def undisturbed(
    settings: LifecycleSettings, victim: Victim, *, extra: Mapping[str, str] | None = None
) -> float:
    """Seconds that a worker takes which nobody kills, from where it is ready."""
    with _worker(settings, victim, extra) as worker:
        started = time.monotonic()
        worker.wait(timeout=600)
        return time.monotonic() - started


@contextmanager
def _worker(
    settings: LifecycleSettings, victim: Victim, extra: Mapping[str, str] | None
) -> Iterator["subprocess.Popen[bytes]"]:
    """A worker that is ready, and killed at the end of the block."""
    worker = subprocess.Popen(
        [sys.executable, "-c", _CODE[victim], str(settings.file)],
        env=environment(extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert worker.stdout is not None
    try:
        worker.stdout.readline()
        yield worker
    finally:
        worker.kill()
        worker.wait(timeout=60)
        worker.stdout.close()


def kill_one(
    life: Lifecycle,
    settings: LifecycleSettings,
    victim: Victim,
    chance: random.Random,
    *,
    longest: float = 0.6,
    extra: Mapping[str, str] | None = None,
) -> None:
    """Start a worker, end it by SIGKILL within `longest` seconds, and look at what it left."""
    with _worker(settings, victim, extra) as worker:
        if victim == "export":
            _wait_for_export(life, worker)
            # Most exports are over in a few milliseconds, but the worker is to get beyond the first one.
            time.sleep(longest * chance.random() ** 6)
        else:
            time.sleep(chance.uniform(0.0, longest))
    # Whatever looks published is whole at any moment.
    for name in manifests(life):
        report = verify(f"{life.published.url}/{name}")
        assert report.ok, report


def _wait_for_export(life: Lifecycle, worker: "subprocess.Popen[bytes]") -> None:
    """Until a file that is being exported stands on the disk, or the worker has ended."""
    deadline = time.monotonic() + 30
    while worker.poll() is None and time.monotonic() < deadline:
        if any(".partial-" in path.name for path in Path(life.published.url).glob("step_*/*/.*")):
            return
        time.sleep(0.001)


def manifests(life: Lifecycle) -> list[str]:
    """Names of all manifests, also where nothing was ever published."""
    try:
        return life.manifests()
    except FileNotFoundError:
        return []


def assert_settled(life: Lifecycle, settings: LifecycleSettings, good: set[str], bad: int) -> None:
    """After a few quiet passes every good step is published once and whole, and nothing else is."""
    for _ in range(4):
        life.once(settings)
    assert life.once(settings).runs[0].unchanged == len(good) + bad
    published = manifests(life)
    steps = sorted(name.partition("/")[0] for name in published)
    assert steps == sorted(good), {step: life.records(step) for step in {*good, *steps}}
    for name in published:
        assert verify(f"{life.published.url}/{name}").ok
    alias = current_alias(life.published)
    assert alias is not None
    assert alias.step_number == max(int(step.removeprefix("step_")) for step in good)
    numbers = [o.name for o in life.published.child("aliases/latest").objects()]
    assert numbers == [f"{number:08d}.json" for number in range(1, len(numbers) + 1)]
    leases = [o.name for o in life.ledger.objects() if o.name.startswith(PREFIX)]
    assert set(leases) <= {f"{PREFIX}probe"}


class Racers:
    """Workers that make a pass each time they are told to, all at once."""

    def __init__(self, settings: LifecycleSettings, count: int = 2) -> None:
        self._workers = [
            subprocess.Popen(
                [sys.executable, "-c", _RACER, str(settings.file)],
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(count)
        ]
        for worker in self._workers:
            assert worker.stdout is not None
            worker.stdout.readline()

    def race(self) -> list[dict[str, Any]]:
        """One pass of each at the same time, and their reports."""
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        reports = []
        for worker in self._workers:
            assert worker.stdout is not None
            reports.append(json.loads(worker.stdout.readline()))
        return reports

    def __enter__(self) -> "Racers":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.close()
            try:
                worker.wait(timeout=120)
            finally:
                worker.kill()
                worker.wait()
                worker.stdout.close()


def race(life: Lifecycle, settings: LifecycleSettings, rounds: int) -> int:
    """Have two workers race for a new good and a new bad step ``rounds`` times, and count what they did.

    Returns:
        How often one of them left a step to the other.
    """
    left = 0
    with Racers(settings) as racers:
        for number in range(rounds):
            life.save(f"step_{2 * number + 1}")
            life.save(f"step_{2 * number + 2}", without=(".metadata",))
            reports = racers.race()
            steps = [step for report in reports for run in report["runs"] for step in run["steps"]]
            left += sum(len(run["leased"]) for report in reports for run in report["runs"])
            done = [
                step["step"]
                for step in steps
                if any(s["stage"] == "publish" and s["outcome"] == "done" for s in step["stages"])
            ]
            assert done == [f"step_{2 * number + 1}"], (number, reports)
            told = [alert["first"] for step in steps for alert in step["alerts"]]
            assert told.count(True) == 1, (number, reports)
    return left
