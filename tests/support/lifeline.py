"""Run a command that must not outlive the process that started it.

`python lifeline.py COMMAND...` starts COMMAND and waits. When its standard input closes, because its
starter closed it or died in whatever way, COMMAND is ended and waited for.
"""

import subprocess
import sys
import threading


def main() -> int:
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)

    def end_with_starter() -> None:
        sys.stdin.buffer.read()
        child.terminate()
        try:
            child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            child.kill()

    threading.Thread(target=end_with_starter, daemon=True).start()
    return child.wait()


if __name__ == "__main__":
    sys.exit(main())
