"""Adds an optional group of packages of pyproject.toml to .venv: `python tools/extra.py site`.

Nothing is done where all of them are there.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils.installation.packages import Packages  # noqa: E402
from utils.installation.ways_out import SetupError  # noqa: E402


def wanted(names: Sequence[str], root: Path = ROOT) -> list[str]:
    """The requirements of some groups.

    Raises:
        SetupError: there is no such group.
    """
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    groups = tomllib.loads(text)["project"]["optional-dependencies"]
    if unknown := [name for name in names if name not in groups]:
        raise SetupError(f"There is no group {unknown[0]!r}; there are {', '.join(groups)}.")
    return [need for name in names for need in groups[name]]


def missing(needs: Sequence[str]) -> list[str]:
    """Those that are not installed here, or in a version that is not meant."""
    return [need for need in needs if not _is_there(Requirement(need))]


def _is_there(need: Requirement) -> bool:
    try:
        return need.specifier.contains(version(need.name), prereleases=True)
    except PackageNotFoundError:
        return False


def main(names: Sequence[str]) -> int:
    """Install what is missing of the groups; 0 if all of it is there then."""
    try:
        if needs := missing(wanted(names)):
            print(f"Adding to .venv: {', '.join(needs)}")
            Packages(ROOT, sys.executable).install(*needs)
            print()
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
