"""`ckpt listen`: steps are processed as soon as somebody says that they are committed."""

from __future__ import annotations

import os
import signal
import traceback
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from dcp.errors import UsageError
from flows.cli.command import command
from flows.cli.failures import FINE, failure_of
from flows.cli.lifecycle_views import errors_of_step, show_step
from flows.cli.options import SETTINGS_FILE, Config
from flows.cli.output import Output
from flows.cli.prefect_environment import prepare_prefect
from flows.text import name

if TYPE_CHECKING:
    from flows.notices import Step
    from flows.settings import LifecycleSettings

SECRET = "CKPT_NOTIFY_SECRET"


@command("listen")
def listen(
    out: Output,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 for any that is free.")] = 8377,
    audience: Annotated[
        str | None,
        typer.Option("--pubsub-audience", metavar="TEXT", help="Take pushes signed by Google for it."),
    ] = None,
    sender: Annotated[
        str | None,
        typer.Option("--pubsub-account", metavar="EMAIL", help="The service account that must sign them."),
    ] = None,
    config: Config = SETTINGS_FILE,
) -> int:
    """Process steps as soon as a notice says that they are committed.

    Takes what dcp.notify_committed sends from a training job, and notifications of a bucket that Pub/Sub
    pushes. With CKPT_NOTIFY_SECRET set, only who knows it is listened to, beside pushes that Google has
    signed; without either, only loopback addresses may be listened at. Notices may be lost: keep ckpt watch
    running. With --json every processed step is one document on a line.

    \b
    Examples:
      ckpt listen
      ckpt listen --host 0.0.0.0 --port 8377 --config lifecycle.toml
    """
    from flows.listener import Guard, Listener, google_tokens
    from flows.settings import load_settings

    settings = load_settings(config)
    secret = os.environ.get(SECRET) or None
    if sender is not None and audience is None:
        raise UsageError("--pubsub-account needs --pubsub-audience, which the tokens are made for")
    if secret is None and audience is None and not _is_loopback(host):
        raise UsageError(f"{host} can be reached by others: set {SECRET}, or give --pubsub-audience")
    guard = Guard(secret, google_tokens(audience) if audience else None, sender)
    prepare_prefect(out.debug)
    with Listener(settings, guard, host=host, port=port) as listener:
        out.note(f"listening at {listener.url}")

        def stop(_: int, __: FrameType | None) -> None:
            listener.end()

        signal.signal(signal.SIGTERM, stop)
        listener.work(partial(process_taken, out, settings))
    return FINE


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def process_taken(out: Output, settings: LifecycleSettings, step: Step) -> None:
    """Process a step that a notice named, and tell what became of it."""
    from prefect.exceptions import TerminationSignal

    from flows.process import process_step_on_notice

    try:
        report = process_step_on_notice(settings, step.run, step.step)
    # Prefect ends a flow in this way. `stop` was called too.
    except TerminationSignal:
        out.warn(f"{name(step.run)} {name(step.step)}: interrupted; the watcher's next pass takes it up")
        return
    # It is told here, and the watcher's next pass meets it too; other steps are still to come.
    except Exception as error:
        if out.debug:
            traceback.print_exc()
        out.warn(f"{name(step.run)} {name(step.step)}: {name(failure_of(error).message, 500)}")
        return
    if out.json:
        out.document(report.model_dump(), one_line=True)
    else:
        out.report(report, lambda: show_step(out, report), errors=errors_of_step(report))
    out.flush()
