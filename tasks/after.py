"""What follows a publication: an event, and a command or a deployment that the settings name.

A step whose publication something is to follow gets the record ``after-due`` before it counts as published,
``after-failed-N`` for each attempt that failed and ``after-done`` at the end. Whoever holds the step's lease
makes the attempts, so there is one at a time. A worker that dies between the end of a command and its record
leaves the command to be run again: at least once, with `CKPT_FINGERPRINT` to tell a repetition by. A
deployment is started under an idempotency key, so Prefect starts one run however often it is asked.
What is published stays published, whatever becomes of this.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO, Any

from dcp.errors import EnvironmentFault
from dcp.findings import Report
from tasks.ledger import Ledger, StepKey
from tasks.text import plain

AFTER_DUE = "after-due"
AFTER_DONE = "after-done"

_FAILED = "after-failed-"
_TAIL = 2000
"""Bytes of output that are looked at, and characters that are told of them."""
_SAID = 500
_MOST = 16 << 20
"""Bytes of output after which only the last of it is kept."""
_LOOK = 0.1
"""Seconds between two looks at how much was printed."""


@dataclass(frozen=True, slots=True)
class Publication:
    """A step that was published just now. ``published`` and ``manifest`` are URLs, ``bytes`` of its files."""

    run: str
    step: str
    number: int
    fingerprint: str
    published: str
    manifest: str
    files: int
    bytes: int

    @property
    def event(self) -> str:
        """Name of the Prefect event."""
        return "checkpoint.published"

    @property
    def resource(self) -> str:
        """Prefect's resource id of the step."""
        return f"checkpoint.{self.run}.{self.step}"

    @property
    def payload(self) -> dict[str, Any]:
        """Everything, as the event carries it."""
        return asdict(self)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that a command gets beside those of this process."""
        return {
            "CKPT_RUN": self.run,
            "CKPT_STEP": self.step,
            "CKPT_NUMBER": str(self.number),
            "CKPT_FINGERPRINT": self.fingerprint,
            "CKPT_PUBLISHED": self.published,
            "CKPT_MANIFEST": self.manifest,
        }


Announce = Callable[[Publication], None]
"""Emits the event of a publication."""
Deploy = Callable[[str, Mapping[str, Any], str], str]
"""Starts a run of a deployment with parameters under an idempotency key, and returns its name."""


class FollowUp(Report):
    """What became of what follows a publication. ``attempts`` counts the failed ones."""

    ok: bool
    attempts: int = 0
    message: str = ""


def after_failures(stages: Iterable[str]) -> list[str]:
    """The records of failed attempts, the first one first."""
    return sorted(
        (stage for stage in stages if stage.startswith(_FAILED)),
        key=lambda stage: (len(stage), stage),
    )


def last_attempt(ledger: Ledger, key: StepKey, stages: frozenset[str]) -> FollowUp | None:
    """What became of the attempts recorded among ``stages``; None if there were none."""
    failed = after_failures(stages)
    if not failed and AFTER_DONE not in stages:
        return None
    ok = AFTER_DONE in stages
    record = ledger.read(key, AFTER_DONE if ok else f"{_FAILED}{len(failed)}")
    return FollowUp(ok=ok, attempts=len(failed), message=str(record.facts.get("message", "")))


def follow_up(ledger: Ledger, key: StepKey, start: Callable[[], str]) -> FollowUp:
    """Make one attempt, unless an earlier one succeeded, and record what came of it.

    Args:
        ledger: of the run.
        key: what was published.
        start: makes the attempt and says what it did.

    Raises:
        StorageError: the ledger failed.
    """
    stages = ledger.stages(key)
    failed = len(after_failures(stages))
    if AFTER_DONE in stages:
        return FollowUp(ok=True, attempts=failed)
    try:
        done = start()
    # Whatever a program or Prefect's client raises is a failed attempt, to be tried again and told.
    except Exception as error:
        message = plain(str(error) or type(error).__name__)
        ledger.create(key, f"{_FAILED}{failed + 1}", {"message": message, "error": type(error).__name__})
        return FollowUp(ok=False, attempts=failed + 1, message=message)
    ledger.create(key, AFTER_DONE, {"message": plain(done)})
    return FollowUp(ok=True, attempts=failed, message=plain(done))


def run_command(command: Sequence[str], publication: Publication, *, directory: str, timeout: float) -> str:
    """Run a program to its end, and give the last of what it printed.

    Args:
        command: program and arguments; no shell takes part.
        publication: told in the environment.
        directory: where it runs.
        timeout: seconds after which it is killed, with everything that it started.

    Raises:
        EnvironmentFault: it could not be started, took too long, or ended otherwise than with 0.
    """
    name = command[0]
    with tempfile.TemporaryFile() as output:
        # Whoever writes goes on at the end, wherever that is after the file was cut off.
        flags = fcntl.fcntl(output, fcntl.F_GETFL)
        fcntl.fcntl(output, fcntl.F_SETFL, flags | os.O_APPEND)
        try:
            process = subprocess.Popen(
                list(command),
                cwd=directory,
                env={**os.environ, **publication.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentFault(f"{name} cannot be started: {error.strerror or error}") from None
        try:
            code, said = _run_out(process, output, timeout)
        except subprocess.TimeoutExpired:
            raise EnvironmentFault(f"{name} took longer than {timeout:.0f} s and was killed") from None
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code:
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise EnvironmentFault(f"{name} {how}{f': {said}' if said else ''}")
    return said or f"{name} ended with exit code 0"


def _run_out(process: subprocess.Popen[bytes], output: IO[bytes], timeout: float) -> tuple[int, str]:
    """Exit code of a process and the last of what it printed, which fills no disk however much it is."""
    deadline = time.monotonic() + timeout
    kept = b""
    while True:
        left = deadline - time.monotonic()
        try:
            code = process.wait(min(_LOOK, max(0.0, left)))
            break
        except subprocess.TimeoutExpired:
            if left <= 0:
                raise
        if os.fstat(output.fileno()).st_size > _MOST:
            kept = _tail(output)
            output.truncate(0)
    said = plain((kept + _tail(output))[-_TAIL:].decode(errors="replace"), _TAIL)
    # Programs say last why they failed.
    return code, said if len(said) <= _SAID else f"…{said[1 - _SAID :]}"


def _tail(output: IO[bytes]) -> bytes:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _TAIL))
    return output.read(_TAIL)
