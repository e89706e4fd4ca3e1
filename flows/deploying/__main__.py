"""``python -m flows.deploying up|down|automations``: what `make deploy-local` and `make deploy-down` call.

``automations`` has the events of the server at PREFECT_API_URL call the URL in WEBHOOK.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path

from dcp.errors import CkptError, UsageError
from flows.deploying.automations import load_automations
from flows.deploying.local import LocalDeployment, Up
from flows.deploying.server import Server


def main() -> int:
    """Bring a local deployment up or take it down; 0, or the exit code of what failed."""
    parser = argparse.ArgumentParser(prog="python -m flows.deploying", description=__doc__)
    parser.add_argument("action", choices=["up", "down", "automations"])
    parser.add_argument("--config", type=Path, default=Path("lifecycle.toml"), help="settings file")
    parser.add_argument("--state", type=Path, default=Path(".deploy-local"), help="directory of its own")
    parser.add_argument("--project", type=Path, default=Path("deployments"), help="holds prefect.yaml")
    arguments = parser.parse_args()
    local = LocalDeployment(arguments.state.absolute(), arguments.project.absolute())
    try:
        if arguments.action == "down":
            ended = local.down()
            say(f"Ended: {', '.join(ended)}" if ended else "Nothing ran.")
        elif arguments.action == "automations":
            server, webhook = _webhook()
            names = load_automations(server, arguments.project / "automations", webhook)
            say(f"Loaded: {', '.join(names)}")
        else:
            # From the environment, because a command line is for everybody to read.
            database = os.environ.get("DATABASE") or None
            show(local.up(arguments.config, say, database), arguments.config)
    except CkptError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def _webhook() -> tuple[Server, str]:
    """Server and webhook, both from the environment: the URL of a webhook is a secret."""
    api, webhook = os.environ.get("PREFECT_API_URL", ""), os.environ.get("WEBHOOK", "")
    if not api or not webhook:
        raise UsageError("set PREFECT_API_URL to the server's and WEBHOOK to the URL to call")
    return Server(api), webhook


def show(up: Up, config: Path) -> None:
    """What a person needs to go on."""
    say("")
    say(f"Prefect's UI      {up.ui}")
    say(f"workers           {', '.join(up.workers)}")
    say(f"deployments       {len(up.deployments)}: {', '.join(up.deployments)}")
    say("")
    say("Next:")
    say(f"  export PREFECT_API_URL={up.api}")
    say(f"  {program('prefect')} deployment run watch/watch      # a pass now; others come by themselves")
    say(f"  {program('ckpt')} status --config {shlex.quote(str(config))}")
    say("  make deploy-down")


def program(name: str) -> str:
    """How to type a program that is installed beside this Python, whose environment need not be active."""
    beside = Path(sys.executable).parent / name
    found = shutil.which(name)
    if not beside.exists() or (found is not None and os.path.realpath(found) == os.path.realpath(beside)):
        return name
    here = Path.cwd()
    return shlex.quote(str(beside.relative_to(here) if beside.is_relative_to(here) else beside))


def say(line: str) -> None:
    """A line for the person at the terminal, at once; nothing once they have stopped reading."""
    try:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Half a deployment helps nobody: it is finished, unheard, and the interpreter's last flush too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
