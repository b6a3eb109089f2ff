"""Sets the course up: creates .venv, installs into it, checks that it works.

Run as `python3 utils/install.py`, or `make setup`. A second call does no work; a call after an
interrupted one goes on where that one stopped. This file is in the syntax of Python 3.6, so that a
Python that is too old still says so in a sentence; the work is done in `utils/installation/`.
"""
# ruff: noqa: UP032, UP035, UP045

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Optional, Sequence

ROOT = Path(__file__).resolve().parents[1]
OLDEST_PYTHON = (3, 11)
NEWER_PYTHONS = ("python3.14", "python3.13", "python3.12", "python3.11")
TOO_OLD = (
    "The course needs Python 3.11 or newer and this is {}. Install a newer one (python.org, or "
    "your system's packages) and name it: `make setup PYTHON=python3.12`."
)


def newer_python(names: Sequence[str] = NEWER_PYTHONS) -> Optional[str]:
    """The first of these that is on the path, runs, and is new enough."""
    probe = "import sys; sys.exit(sys.version_info < {})".format(OLDEST_PYTHON)
    for path in filter(None, map(shutil.which, names)):
        if subprocess.call([path, "-c", probe], stderr=subprocess.DEVNULL) == 0:
            return path
    return None


def main(version: Sequence[int] = sys.version_info[:2]) -> int:
    """Set up if needed; 0 when the course is ready."""
    if tuple(version) < OLDEST_PYTHON:
        better = newer_python()
        if better is None:
            print(TOO_OLD.format(".".join(map(str, version))), file=sys.stderr)
            return 1
        os.execv(better, [better, __file__])
    sys.path[0] = str(ROOT)  # in place of utils/, whose modules would stand before the library's
    from utils.installation.setup import install

    return install(ROOT)


if __name__ == "__main__":
    sys.exit(main())
