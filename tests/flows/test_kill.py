"""kill -9 at random moments of a real worker: afterwards every good step is published once and whole."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.publish import current_alias, verify
from tests.support.lifecycle import Lifecycle, webhook

STEPS = 6
KILLS = 6

WORKER = """
import sys
from flows.passes import process_directly, run_pass
from flows.settings import load_settings
settings = load_settings(sys.argv[1])
print("ready", flush=True)
run_pass(settings, process_directly(settings))
"""


@pytest.mark.slow
def test_killed_workers_lose_and_double_nothing(tmp_path: Path) -> None:
    life = Lifecycle(str(tmp_path / "place"), tmp_path / "settings")
    for number in range(STEPS):
        life.save(f"step_{number}", "torch_fsdp2_file_per_tensor")
    life.save("step_9", without=(".metadata",))
    chance = random.Random(6)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with webhook() as sink:
        settings = life.settings(top='resend_after = "0s"', alerts=[sink.url])
        for _ in range(KILLS):
            worker = subprocess.Popen(
                [sys.executable, "-c", WORKER, str(settings.file)], env=environment, stdout=subprocess.PIPE
            )
            assert worker.stdout is not None
            worker.stdout.readline()
            time.sleep(chance.uniform(0.0, 0.6))
            worker.kill()
            worker.wait(timeout=30)
            worker.stdout.close()
            for name in _manifests(life):
                assert verify(f"{life.published.url}/{name}").ok
        for _ in range(3):
            life.once(settings)
        assert life.once(settings).runs[0].unchanged == STEPS + 1
        # A worker may have died between sending and recording that it sent.
        assert len(sink.received) in (1, 2)
    assert len(_manifests(life)) == STEPS
    assert all(verify(f"{life.published.url}/{name}").ok for name in _manifests(life))
    alias = current_alias(life.published)
    assert alias is not None
    assert alias.step == f"step_{STEPS - 1}"


def _manifests(life: Lifecycle) -> list[str]:
    return life.manifests() if Path(life.published.url).exists() else []
