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
        fingerprint, modules = self.read()
        return fingerprint == self.fingerprint() and modules <= self.venv.modules()

    def read(self) -> tuple[str, set[str]]:
        """The fingerprint of the set-up that finished, and its modules; "" where none is told.

        A mark that cannot be read is none: the set-up then does its work again.
        """
        try:
            words = self.file.read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError):
            return "", set()
        return (words[0], set(words[1:])) if words else ("", set())

    def write(self) -> None:
        """Leave the mark, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        words = [self.fingerprint(), *sorted(self.venv.modules())]
        part = self.file.with_name(f"{self.file.name}.part")
        try:
            part.write_text(" ".join(words), encoding="utf-8")
            part.replace(self.file)
        finally:
            part.unlink(missing_ok=True)

    def remove(self) -> None:
        """Take the mark away, as a set-up begins."""
        self.file.unlink(missing_ok=True)
