"""What Prefect must find in the environment when it is first imported by a command."""

from __future__ import annotations

import os


def prepare_prefect(debug: bool) -> None:
    """Set what the user has not set otherwise. Must come before anything imports prefect."""
    defaults = {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        # The temporary server that Prefect starts where no other is configured is slow on a busy machine.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    }
    if not debug:
        # Its internals complain on stderr, past all loggers, about what it mends itself.
        defaults["PREFECT_LOGGING_HANDLERS_DEBUG_LEVEL"] = "CRITICAL"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def isolate_prefect(home: str) -> None:
    """Use a Prefect of our own in ``home``: none of the user's profiles, servers or accounts."""
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        del os.environ[name]
    os.environ["PREFECT_HOME"] = home
    os.environ["PREFECT_SERVER_ALLOW_EPHEMERAL_MODE"] = "true"
