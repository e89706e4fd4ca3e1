"""The `ckpt` command.

`commands` has them all; `entry` parses the command line and answers for usage errors; `command` makes a
command of a function; `ending` ends it in order where a signal asks for that;
the `*_commands` modules hold them; `output` prints for people and programs; `views` says what of a report
a person sees; `failures` turns exceptions into a message, advice and an exit code. Command bodies import
what they need, so that ``ckpt --help`` stays fast and inspecting loads neither torch nor prefect.
"""

import sys

_INTERRUPTED = 130


def main() -> None:
    """The console script. What it takes is imported within, so that Ctrl-C is answered for from the start."""
    try:
        from flows.cli.entry import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


__all__ = ["main"]
