"""Rules, format, types and the direction of imports, each by its own tool: `make style`."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
Command = tuple[str, ...]
# All four read pyproject.toml. Side by side: types take longer than the others together.
TOOLS: tuple[Command, ...] = (
    ("ruff", "check", "--quiet"),
    ("ruff", "format", "--check", "--quiet"),
    ("lint-imports", "--no-logo"),
    ("basedpyright", "--pythonpath", sys.executable),
)


def main() -> int:
    """Run every tool, and print what those say that find something; 0 if none does."""
    with ThreadPoolExecutor(len(TOOLS)) as pool:
        return max(
            [_told(*done.result()) for done in as_completed(map(partial(pool.submit, _run), TOOLS))]
        )


def _run(command: Command) -> tuple[Command, subprocess.CompletedProcess[str]]:
    program = [str(BIN / command[0]), *command[1:]]
    return command, subprocess.run(program, cwd=ROOT, capture_output=True, text=True)


def _told(command: Command, done: subprocess.CompletedProcess[str]) -> int:
    """Print what a tool found, as soon as it is known; 0 if nothing."""
    print(f"{'found something' if done.returncode else 'passed':<16}{' '.join(command[:2])}")
    if done.returncode:
        print(done.stdout + done.stderr)
    return 1 if done.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
