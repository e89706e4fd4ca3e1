"""All commands: who imports this has registered them."""

from __future__ import annotations

from flows.cli import (
    checkpoint_commands,
    comparison_commands,
    import_commands,
    lifecycle_commands,
    listen_command,
    published_commands,
    report_command,
    retire_command,
)
from flows.cli.demo_command import demo

__all__ = [
    "checkpoint_commands",
    "comparison_commands",
    "demo",
    "import_commands",
    "lifecycle_commands",
    "listen_command",
    "published_commands",
    "report_command",
    "retire_command",
]
