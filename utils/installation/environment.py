"""The virtual environment: kept and mended where it works, made where it does not."""

from __future__ import annotations

import csv
import os
import pkgutil
import shutil
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from utils.installation.programs import output_of
from utils.installation.ways_out import SetupError, explain, show_end

find_spec = PathFinder.find_spec  # of files alone: setuptools has a finder that warns

VERSION = "import sys; v = sys.version_info; v < (3, 11) or print(v[0], v[1], sep='.')"
WITHOUT_VENV = (
    "Python {0}.{1} came without its venv module. On Debian and Ubuntu: "
    "`apt install python{0}.{1}-venv`; then run `make setup` again."
)


class Environment:
    """The folder `.venv` of a repository, and its interpreter."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    def make(self) -> str:
        """Keep what works, make a new one in place of what does not; returns what was done.

        Raises:
            SetupError: it cannot be made.
        """
        if find_spec("venv") is None or not (find_spec("ensurepip") or find_spec("pip")):
            raise SetupError(WITHOUT_VENV.format(*sys.version_info))
        had, version, place = self.folder.exists(), self.version(), self.folder.resolve()
        python, new = (str(self.python), []) if version else (sys.executable, ["--clear"])
        # Where it is kept, this writes anew what names a folder that was renamed since.
        self._run([python, "-m", "venv", "--without-pip", *new, str(place)])
        with (place / "pyvenv.cfg").open("a", encoding="utf-8") as settings:
            settings.write("relocatable = true\n")  # uv's launchers then find it anywhere
        self._install_pip(os.fsencode(place))
        for record in (damaged := [path for path in self.records() if not is_whole(path)]):
            shutil.rmtree(record)  # so that it is installed again
        if version:
            told = f", damaged packages forgotten: {len(damaged)}" if damaged else ""
            return f"kept, with its Python {version}{told}"
        return "made anew: the one that was there does not run here" if had else "made"

    def _install_pip(self, place: bytes) -> None:
        launcher = self.python.with_name("pip3")
        if launcher.is_file() and place in launcher.read_bytes():
            return
        for record in self.records("pip"):  # of a pip whose launcher names another folder
            shutil.rmtree(record)
        ours = [str(self.python), "-m", "ensurepip", "--default-pip"]
        theirs = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "pip"]
        self._run(ours if find_spec("ensurepip") else theirs)  # Debian's Python may lack it

    def _run(self, command: list[str]) -> None:
        status, output = output_of(command, self.folder.parent)
        if status:
            show_end(output)
            raise SetupError(f"The environment {self.folder} cannot be made. {explain(output)}")

    def version(self) -> str:
        """Its Python's version as "3.11"; "" if it does not run or is too old."""
        status, output = output_of([str(self.python), "-c", VERSION], self.folder.parent)
        return "" if status else output.strip()

    def sites(self) -> list[Path]:
        """Where packages lie; the pattern leaves out lib64, which is a link to lib."""
        unix = self.folder.glob("lib/python*/site-packages")
        return list(unix) or [self.folder / "Lib/site-packages"]

    def modules(self) -> set[str]:
        """What can be imported from it, without importing it."""
        return {module.name for module in pkgutil.iter_modules(map(str, self.sites()))}

    def records(self, name: str = "*") -> list[Path]:
        """The folders in which installed packages keep their name and version."""
        return [path for site in self.sites() for path in site.glob(f"{name}-*.dist-info")]

    def installed(self, name: str) -> str:
        """An installed package's version; "" where it is missing."""
        return next((path.stem.partition("-")[2] for path in self.records(name)), "")


def is_whole(record: Path) -> bool:
    """Whether a package was installed to the end, and each of its files is still there."""
    if not (record / "INSTALLER").is_file() or not (record / "RECORD").is_file():
        return False  # installers write these last
    with (record / "RECORD").open(encoding="utf-8", newline="") as lines:
        files = [row[0] for row in csv.reader(lines) if row and not row[0].endswith(".pyc")]
    return all((record.parent / file).exists() for file in files)
