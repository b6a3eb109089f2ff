"""Build the exported Dockerfile by buildah, on a base made of this system's own shell and Python.

NVIDIA's base is 10 GB and more behind a registry. What is proved here is the rest: that the file is
read, that its steps run in a container, and that the folder lies in it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from utils.files import scratch

BASE, IMAGE = "localhost/base:1", "localhost/job:1"
SECONDS = 300.0
PROGRAMS = ("/bin/sh", "/bin/ls")
LEFT_OUT = shutil.ignore_patterns(
    "test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"
)


class ContainerError(RuntimeError):
    """The image cannot be built; the text is buildah's own."""


def container_problem() -> str:
    """Why no image can be built here, in a sentence; "" where it can."""
    if shutil.which("buildah") is None:
        return "There is no buildah here (apt-get install buildah), so the image is not built."
    if os.geteuid() != 0:
        return "buildah's chroot isolation needs root, and you are not, so the image is not built."
    return ""


def build_container(folder: Path | str, run: Sequence[str]) -> str:
    """Build the folder's Dockerfile on a local base, and run a command in the image.

    Returns:
        What the command printed.

    Raises:
        ContainerError: a step failed, or no image can be built here.
    """
    if problem := container_problem():
        raise ContainerError(problem)
    with scratch("image") as place:
        _base_files(place / "files")
        base = _buildah(place, "from", "scratch")
        _buildah(place, "copy", base, str(place / "files"), "/")
        _buildah(place, "commit", base, BASE)
        _buildah(
            place,
            "build",
            "--pull=never",
            "--isolation=chroot",
            f"--build-arg=BASE={BASE}",
            f"--tag={IMAGE}",
            str(folder),
        )
        made = _buildah(place, "from", "--pull=never", IMAGE)
        return _buildah(place, "run", "--isolation=chroot", made, "--", *run)


def _buildah(place: Path, verb: str, *words: str) -> str:
    storage = [f"--root={place}/storage", f"--runroot={place}/run", "--storage-driver=vfs"]
    done = subprocess.run(
        ["buildah", *storage, verb, *words],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=os.environ | {"TMPDIR": str(place)},
    )
    if done.returncode:
        raise ContainerError(f"buildah {verb}: {done.stderr.strip()[-500:]}")
    return done.stdout.strip()


def _base_files(target: Path) -> None:
    """A shell, Python with its library, what they are linked to, and a stand-in for PyTorch."""
    python = Path(sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib"))
    extensions = [str(path) for path in library.glob("lib-dynload/*.so")]
    for path in {*PROGRAMS, *_linked([*PROGRAMS, str(python), *extensions])}:
        _copy(Path(path), target)
    _copy(python, target)
    shutil.copytree(library, target / library.relative_to("/"), ignore=LEFT_OUT, dirs_exist_ok=True)
    link = target / "usr/bin/python3"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(python)
    (target / library.relative_to("/") / "torch.py").write_text("", encoding="utf-8")
    (target / "tmp").mkdir()


def _copy(path: Path, target: Path) -> None:
    place = target / path.relative_to("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path.resolve(), place)


def _linked(programs: Sequence[str]) -> set[str]:
    """The libraries of programs, with the loader, as ldd prints them."""
    done = subprocess.run(["ldd", *programs], capture_output=True, text=True)
    return set(re.findall(r"(/\S+\.so\S*)\s+\(0x", done.stdout))
