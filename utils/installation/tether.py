"""Runs a command that ends, with all that it started, when the process above ends.

`python tether.py FD COMMAND...`: FD is the end of a pipe whose other end the parent alone holds.
However the parent dies, `kill -9` included, the system closes that end. This works on every Unix,
and reaches grandchildren (a compiler, a build), which Linux's parent-death signal does not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def end_with(lifeline: int) -> None:
    """Wait for the parent's end of the pipe to close, then kill this process's whole group."""
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    """Run the command of the arguments and return its exit status."""
    lifeline, command = int(sys.argv[1]), sys.argv[2:]
    threading.Thread(target=end_with, args=(lifeline,), daemon=True).start()
    return subprocess.call(command)


if __name__ == "__main__":
    sys.exit(main())
