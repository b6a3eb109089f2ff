"""Rules, format, types and the direction of imports, each by its own tool: `make style`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
# All four read pyproject.toml.
TOOLS = (
    ("ruff", "check", "--quiet"),
    ("ruff", "format", "--check", "--quiet"),
    ("lint-imports", "--no-logo"),
    ("basedpyright", "--pythonpath", sys.executable),
)


def main() -> int:
    """Run every tool, and print what those say that find something; 0 if none does."""
    failed = [name for name in TOOLS if not _passes(name)]
    return 1 if failed else 0


def _passes(command: tuple[str, ...]) -> bool:
    done = subprocess.run(
        [BIN / command[0], *command[1:]], cwd=ROOT, capture_output=True, text=True
    )
    print(f"{'found something' if done.returncode else 'passed':<16}{' '.join(command[:2])}")
    if done.returncode:
        print(done.stdout + done.stderr)
    return not done.returncode


if __name__ == "__main__":
    sys.exit(main())
