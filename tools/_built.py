"""Whether what was built still is of the files that it was built from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

# What the site or the decks are made of; a change of any of it builds both anew.
INPUTS = (
    "*.md",
    "pyproject.toml",
    "docs/**/*",
    "notebooks/**/*.ipynb",
    "labs/**/*.ipynb",
    "solutions/**/*.ipynb",
    "sources/**/*.py",
    "tools/*.py",
    "utils/labs/*.py",
)
LEFT_OUT = {"__pycache__", ".ipynb_checkpoints"}


def digest(root: Path) -> str:
    """A hash over the names and contents of all inputs."""
    found = hashlib.sha256()
    for path in sorted(set(_inputs(root))):
        found.update(path.relative_to(root).as_posix().encode() + b"\0")
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def _inputs(root: Path) -> Iterator[Path]:
    for pattern in INPUTS:
        for path in root.glob(pattern):
            if path.is_file() and not LEFT_OUT & set(path.relative_to(root).parts):
                yield path


def mark(folder: Path, inputs: str) -> None:
    """Note beside a folder that it was built from inputs of this digest."""
    _note(folder).write_text(inputs + "\n", encoding="utf-8")


def is_current(folder: Path, inputs: str) -> bool:
    """Whether a folder was built, as a whole, from inputs of this digest."""
    note = _note(folder)
    return folder.is_dir() and note.is_file() and note.read_text(encoding="utf-8").strip() == inputs


def _note(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.inputs")
