"""Passes that need no Prefect: a due step is processed by a plain call."""

from flows.lifecycle import process_step
from flows.passes import Processor
from flows.settings import LifecycleSettings, RunSettings
from flows.workshop import StepReport, Workshop
from tasks.after import Announce
from tasks.alert import Emit


def process_directly(
    settings: LifecycleSettings, *, emit: Emit | None = None, announce: Announce | None = None
) -> Processor:
    """The processor for `flows.passes.run_pass`."""

    def process(run: RunSettings, step: str) -> StepReport:
        return process_step(Workshop.of(settings, run.name, emit=emit, announce=announce), step)

    return process
