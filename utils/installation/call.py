"""One call of `make setup`: nothing where all is done, alone where there is work."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from utils.installation.children import alone
from utils.installation.stamp import Stamp
from utils.installation.ways_out import SetupError, explain_system


def install(root: Path) -> int:
    """Set up if needed, never beside another call; 0 when the course is ready."""
    stamp = Stamp(root)
    try:
        if not stamp.is_valid():
            with alone(root / "build" / "setup.lock", say_waiting) as lock:
                if not stamp.is_valid():  # another call may have done it meanwhile
                    set_up(root, lock)
                    return 0
        print("Set-up is complete. (Another Python or build of torch: delete .venv first.)")
    except SetupError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"\nSet-up stopped. {explain_system(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. `make setup` goes on from here.", file=sys.stderr)
        return 130
    return 0


def set_up(root: Path, lock: int | None) -> None:
    """Do all the work.

    Raises:
        SetupError: a step failed.
        OSError: the mark of a finished set-up cannot be written.
    """
    from utils.installation.setup import Setup  # here: a call without work is quicker without it

    Setup(root, os.environ.get("TORCH_INDEX", ""), lock=lock).run()


def say_waiting() -> None:
    """Say why nothing happens."""
    print("Another set-up is at work in this folder; this one waits for it to end.", flush=True)
