"""Packs the course for machines without a network: `make wheelhouse`.

build/wheelhouse then holds the course, every package as a wheel, the data, and `setup.sh`, which
sets a copy up from them alone. It fits machines of the same system, processor and Python version as
the one that packed it. Carry it on a disk, or serve it in the room.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import constraints  # noqa: E402

from utils.installation import torch_build  # noqa: E402
from utils.installation.packages import Packages  # noqa: E402

# What the course consists of, for a copy without git, and what is left in it by working with it.
COURSE = (
    ".ci", ".gitattributes", ".github", ".gitignore", ".pre-commit-config.yaml", "CHANGELOG.md",
    "CITATION.cff", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md",
    "conftest.py", "constraints.txt", "docs", "environment.yml", "evidence", "labs", "notebooks",
    "pyproject.toml", "solutions", "sources", "tests", "tools", "utils",
)  # fmt: skip
LEAVINGS = ("__pycache__", "*.pyc", ".ipynb_checkpoints", ".env*", "my_labs", "*~", ".*.swp",
            ".DS_Store", ".pytest_cache", ".hypothesis", ".benchmarks")  # fmt: skip
DATA = "from utils.data import cifar10; print(cifar10('train').source)"
SET_UP = """#!/bin/sh
# Sets the course up from the wheels beside this file. No network is asked.
set -eu
here="$(cd "$(dirname "$0")" && pwd)"
case "$here" in *" "*) echo "Put this folder where its path has no spaces: pip cannot read $here."; exit 1;; esac
unset PIP_INDEX_URL PIP_EXTRA_INDEX_URL UV_INDEX UV_DEFAULT_INDEX UV_FIND_LINKS
export PIP_CONFIG_FILE=/dev/null PIP_NO_INDEX=1 PIP_FIND_LINKS="$here/wheels"
cd "$here/course"
${PYTHON:-python3} utils/install.py
echo "Ready. Start with: cd $here/course && make lab"
"""
README = """The course Big Models, Small Memory, for machines without a network

1. Copy this folder to the machine, to a path without spaces.
2. Run: sh setup.sh
3. Then, in course/: make lab

Packed on {system} for Python {python}, processor {machine}, PyTorch {torch}.
Data: {data}
"""


def pack(root: Path, kit: Path, torch_index: str = "") -> None:
    """Write the kit into a folder.

    Raises:
        subprocess.CalledProcessError: git or pip failed, and has said why.
    """
    shutil.rmtree(kit, ignore_errors=True)
    copy_course(root, kit / "course")
    build = chosen_build(root, torch_index)
    print(f"PyTorch: {build.reason}", flush=True)
    collect(root, kit / "wheels", build.index_url)
    data = copy_data(root, kit / "course/data")
    (kit / "setup.sh").write_text(SET_UP, encoding="utf-8")
    told = README.format(
        system=platform.system(), python=".".join(platform.python_version_tuple()[:2]),
        machine=platform.machine(), torch=torch_of(kit / "wheels"), data=data,
    )  # fmt: skip
    (kit / "README.txt").write_text(told, encoding="utf-8")


def chosen_build(root: Path, torch_index: str) -> torch_build.TorchBuild:
    """PyTorch's build as `make setup` would choose it on this machine."""
    return torch_build.choose(Packages(root, sys.executable), torch_index)


def copy_course(root: Path, target: Path) -> None:
    """The course's own files: what git tracks, else what lies in the course's own folders.

    Links are followed to other files of the course and left out otherwise, so that nothing comes
    along that the learners of this copy, or other programs, have put there.
    """
    root = root.resolve()
    names = course_files(root)
    for name in sorted(names):
        file = (root / name).resolve()
        is_own = file.is_relative_to(root) and file.relative_to(root).as_posix() in names
        if is_own and file.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target / name)


def course_files(root: Path) -> set[str]:
    """The paths of the course's files below `root`, with "/" between their parts."""
    tracked, problem = tracked_files(root)
    if not problem:
        return tracked
    print(f"{problem}: the course's own folders are packed, with all that lies in them.")
    found = [path for part in COURSE for path in ((root / part).rglob("*"), [root / part])]
    files = {path.relative_to(root) for paths in found for path in paths if not path.is_dir()}
    return {
        file.as_posix()
        for file in files
        if not any(fnmatch.fnmatch(part, leaving) for part in file.parts for leaving in LEAVINGS)
    }


def tracked_files(root: Path) -> tuple[set[str], str]:
    """What git tracks, and why it cannot be asked; an archive has no git folder of its own."""
    if not (root / ".git").exists():
        return set(), "This copy is no clone"
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached"]
    try:
        done = subprocess.run(command, capture_output=True, check=True)
    except FileNotFoundError:
        return set(), "git is not installed"
    except subprocess.CalledProcessError as error:
        return set(), f"git does not answer ({error.stderr.decode(errors='replace').strip()})"
    return {os.fsdecode(name) for name in done.stdout.split(b"\0") if name}, ""


def collect(root: Path, wheels: Path, torch_index: str = "") -> None:
    """Every package as a wheel, in the versions that were tried; sources are built here."""
    pip = [sys.executable, "-m", "pip", "wheel", "-qq", "--wheel-dir", str(wheels)]
    fixed = ["--constraint", str(root / "constraints.txt")]
    if torch_index:  # first: what lies in the folder is taken from there below
        pair = map(Packages(root, sys.executable).pinned, torch_build.PAIR)
        subprocess.run([*pip, "--no-deps", "--index-url", torch_index, *pair], check=True)
    needs = map(str, constraints.declared(root))
    subprocess.run([*pip, *fixed, "--find-links", str(wheels), *needs], check=True)


def copy_data(root: Path, target: Path) -> str:
    """What lessons would fetch: CIFAR-10; returns what a reader should know of it."""
    done = subprocess.run([sys.executable, "-c", DATA], cwd=root, capture_output=True, text=True)
    folder = root / "data"
    if done.returncode or not folder.is_dir():
        return "none; lessons 02 and 04 draw images of their own"
    for part in folder.glob("*cifar-10*"):
        if part.is_dir():
            shutil.copytree(part, target / part.name, dirs_exist_ok=True)
    return done.stdout.strip().splitlines()[-1]


def torch_of(wheels: Path) -> str:
    """The version of torch that was packed."""
    names = [path.name.split("-")[1] for path in wheels.glob("torch-*.whl")]
    return names[0] if names else "missing"


def summary(kit: Path) -> dict[str, float]:
    """Sizes of the kit, for its last line."""
    wheels = list((kit / "wheels").glob("*.whl"))
    size = sum(path.stat().st_size for path in kit.rglob("*") if path.is_file())
    return {"wheels": len(wheels), "GB": round(size / 1e9, 2)}


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Pack; 0 if the kit is whole."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--to", type=Path, default=root / "build/wheelhouse", help="default: build/wheelhouse"
    )
    parser.add_argument("--torch-index", default="", help="another index for torch and torchvision")
    options = parser.parse_args(arguments)
    try:
        pack(root, options.to, options.torch_index)
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"The kit is not whole: {error}. Its words stand above; with a network, make "
              "wheelhouse begins anew.", file=sys.stderr)  # fmt: skip
        return 1
    print(f"{options.to}: {json.dumps(summary(options.to))}; there: sh setup.sh")
    return 0


if __name__ == "__main__":
    sys.exit(main())
