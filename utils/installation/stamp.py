"""What lets a second call do nothing: a file that a finished set-up leaves in .venv."""

from __future__ import annotations

import hashlib
from pathlib import Path

from utils.installation.environment import Environment

COUNTING_SOURCE = "utils/memory/counting.cpp"


class Stamp:
    """The mark of a finished set-up of one repository: what was asked for, and what came of it."""

    def __init__(self, root: Path) -> None:
        self.root, self.venv = root, Environment(root / ".venv")
        self.file = self.venv.folder / "course-stamp"

    def fingerprint(self) -> str:
        """Changes with what was asked for, the Python it was installed for, and the folder."""
        lists, rest = ("pyproject.toml", "constraints.txt"), (".venv/pyvenv.cfg", COUNTING_SOURCE)
        present = [self.root / name for name in lists + rest if (self.root / name).is_file()]
        parts = [str(self.venv.folder.resolve()).encode(), *(path.read_bytes() for path in present)]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    def is_valid(self) -> bool:
        """Whether a call finished this very set-up, and all that could be imported then still can.

        Packages that the learner added since are none of its concern.
        """
        if not self.file.is_file():
            return False
        fingerprint, *modules = self.file.read_text(encoding="utf-8").split()
        return fingerprint == self.fingerprint() and set(modules) <= self.venv.modules()

    def write(self) -> None:
        """Leave the mark.

        Raises:
            OSError: it cannot be written.
        """
        words = [self.fingerprint(), *sorted(self.venv.modules())]
        self.file.write_text(" ".join(words), encoding="utf-8")

    def remove(self) -> None:
        """Take the mark away, as a set-up begins."""
        self.file.unlink(missing_ok=True)
