"""The virtual environment: kept where it works, made where it does not, mended where it moved."""

from __future__ import annotations

import csv
import errno
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from utils.installation.children import Children
from utils.installation.ways_out import SetupError, explain, last_words

# The first lines of a script that starts with the environment's own Python, in both forms.
LAUNCHER = re.compile(rb"\A#!(?:/bin/sh\n'''exec' .*\n' '''|.*python[\d.]*)(?=\r?\n)")
OLDEST_PYTHON = (3, 11)
WORKS = f"import sys, pip; sys.exit(sys.version_info < {OLDEST_PYTHON})"
ROOM_FOR_PIP = 50 * 10**6  # bytes; an environment with pip alone takes some 20 MB
LONGEST_SHEBANG = 127  # Linux reads no more of a script's first line
LIST_MODULES = (
    "import pkgutil, site; print(*{m.name for m in pkgutil.iter_modules(site.getsitepackages())})"
)


class Environment:
    """The folder `.venv` of a repository.

    Attributes:
        folder: The environment itself.
        python: Its interpreter.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    def make(self, children: Children) -> str:
        """Keep what works, make a new one in place of what does not; returns what was done.

        Raises:
            SetupError: it cannot be made.
        """
        if self.works():
            return f"kept, with its Python {self.version()}" + self._moved() + self._damaged()
        had = self.folder.exists()
        command = [sys.executable, "-m", "venv", "--clear", str(self.folder)]
        status, output = children.output_of(command)
        if status:
            print("\n" + "\n".join(last_words(output)))
            # venv does not say why pip could not be unpacked.
            is_full = shutil.disk_usage(self.folder.parent).free < ROOM_FOR_PIP
            reason = explain(os.strerror(errno.ENOSPC) if is_full else output)
            raise SetupError(f"The environment {self.folder} could not be made. {reason}")
        return "made anew: the one that was there does not run here" if had else "made"

    def works(self) -> bool:
        """Whether its interpreter runs, is new enough and has pip."""
        if not self.python.exists():
            return False
        try:
            done = subprocess.run([str(self.python), "-c", WORKS], stderr=subprocess.DEVNULL)
        except OSError:
            return False
        return done.returncode == 0

    def version(self) -> str:
        """Its Python's version as "3.11"; this process's where it does not say."""
        settings = self.folder / "pyvenv.cfg"
        text = settings.read_text(encoding="utf-8") if settings.is_file() else ""
        found = re.search(r"^version(?:_info)? *= *(\d+\.\d+)", text, re.MULTILINE)
        return found[1] if found else ".".join(map(str, sys.version_info[:2]))

    def modules(self) -> set[str]:
        """What can be imported from it, without importing it; empty if it is broken."""
        command = [str(self.python), "-I", "-c", LIST_MODULES]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError:
            return set()
        return set(done.stdout.split()) if done.returncode == 0 else set()

    def site_packages(self) -> list[Path]:
        """Where packages lie; the pattern leaves out lib64, which is a link to lib."""
        unix, windows = (
            self.folder.glob("lib/python*/site-packages"),
            self.folder / "Lib/site-packages",
        )
        return list(unix) or [windows]

    def records(self) -> list[Path]:
        """The folders in which installed packages keep their name and version."""
        return [path for folder in self.site_packages() for path in folder.glob("*.dist-info")]

    def installed(self, name: str) -> str | None:
        """An installed package's version; None where it is missing."""
        folders = (path.name.removesuffix(".dist-info") for path in self.records())
        return next(
            (version for found, _, version in (f.partition("-") for f in folders) if found == name),
            None,
        )

    def _damaged(self) -> str:
        """Forget packages of which a part is missing, so that they are installed again."""
        damaged = [path for path in self.records() if not is_whole(path)]
        for path in damaged:
            shutil.rmtree(path)
        return f", damaged packages forgotten: {len(damaged)}" if damaged else ""

    def _moved(self) -> str:
        """Mend what names the folder's old place, if it was renamed: activation and launchers."""
        settings = self.folder / "pyvenv.cfg"
        # The command that made it ends in its path, from Python 3.11 on.
        old = settings.read_text(encoding="utf-8").partition(" --clear ")[2].partition("\n")[0]
        if os.name == "nt" or not old or os.path.realpath(old) == os.path.realpath(self.folder):
            return ""
        for script in filter(is_script, self.python.parent.iterdir()):
            text = launched_by(str(self.python), script.read_bytes())
            script.write_bytes(text.replace(old.encode(), str(self.folder).encode()))
        settings.write_text(
            settings.read_text(encoding="utf-8").replace(old, str(self.folder)), encoding="utf-8"
        )
        return ", mended: its folder was renamed"


def is_whole(record: Path) -> bool:
    """Whether a package was installed to the end, and each of its files is still there."""
    if not (record / "INSTALLER").is_file() or not (record / "RECORD").is_file():
        return False  # installers write these last
    with (record / "RECORD").open(encoding="utf-8", newline="") as lines:
        files = [row[0] for row in csv.reader(lines) if row and not row[0].endswith(".pyc")]
    return all(os.path.exists(record.parent / file) for file in files)


def is_script(path: Path) -> bool:
    """Whether a file of `bin/` is text, and the environment's own."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return b"\0" not in file.read(1024)


def launched_by(python: str, script: bytes) -> bytes:
    """A script that starts with another Python; unchanged where it starts with none."""
    line = f"#!{python}"
    if " " in python or len(line.encode()) > LONGEST_SHEBANG:
        line = f"#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''"
    return LAUNCHER.sub(lambda _: line.encode(), script)


def check_parts(
    version: Sequence[int] = sys.version_info[:2], modules: Iterable[str] = ("venv", "ensurepip")
) -> str:
    """This Python's version; refuses one that cannot make environments.

    Raises:
        SetupError: it came without the module for them.
    """
    found = ".".join(map(str, version))
    if not all(importlib.util.find_spec(name) for name in modules):
        raise SetupError(
            f"Python {found} came without its venv module. On Debian and Ubuntu: "
            f"`apt install python{found}-venv`; then run `make setup` again."
        )
    return found
