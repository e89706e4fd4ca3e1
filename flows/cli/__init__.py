"""The `ckpt` command.

`entry` parses the command line and answers for usage errors; `command` makes a command of a function;
the `*_commands` modules hold them; `output` prints for people and programs; `views` says what of a report
a person sees; `failures` turns exceptions into a message, advice and an exit code. Command bodies import
what they need, so that ``ckpt --help`` stays fast and inspecting loads neither torch nor prefect.
"""

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
from flows.cli.entry import main

__all__ = [
    "checkpoint_commands",
    "comparison_commands",
    "demo",
    "import_commands",
    "lifecycle_commands",
    "listen_command",
    "main",
    "published_commands",
    "report_command",
    "retire_command",
]
