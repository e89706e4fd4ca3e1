"""All commands: who imports this has registered them."""

from __future__ import annotations

from flows.cli import (
    checkpoint_commands,
    comparison_commands,
    demo_command,
    import_commands,
    lifecycle_commands,
    listen_command,
    published_commands,
    report_command,
    retire_command,
)

__all__ = [
    "checkpoint_commands",
    "comparison_commands",
    "demo_command",
    "import_commands",
    "lifecycle_commands",
    "listen_command",
    "published_commands",
    "report_command",
    "retire_command",
]
