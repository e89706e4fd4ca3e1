"""``python -m flows.cli``: the command where the console script is not on the path."""

from flows.cli import main

main()
