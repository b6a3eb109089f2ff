"""Makes a Colab kernel ready for the course. Standard library only: it runs before all else."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

# Colab brings its own torch, built for its driver, and its own notebook server: replacing the
# first breaks the GPU, and the second is of no use there.
LEFT_ALONE = frozenset({"torch", "torchvision", "jupyterlab", "jupytext", "nbclient", "nbconvert"})


def prepare(root: Path) -> None:
    """Install what is missing, without touching what is there, and say what is too old."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = [split(requirement) for requirement in settings["project"]["dependencies"]]
    add([name for name, _ in wanted if name not in LEFT_ALONE and installed(name) is None])
    for name, oldest in wanted:
        if (found := installed(name)) and numbers(found) < numbers(oldest):
            print(
                f"Colab has {name} {found}; the course was written for {oldest} or newer. "
                "Cells that need the newer one will fail, all others work."
            )


def split(requirement: str) -> tuple[str, str]:
    """Name and lower bound of "torch>=2.11"."""
    name, _, oldest = requirement.partition(">=")
    return name, oldest


def installed(name: str) -> str | None:
    """The version of an installed package, None where it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """The release numbers of "2.15.0+cu132", to compare by."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


def add(names: list[str]) -> None:
    """Install packages with pip, leaving their dependencies as they are."""
    if not names:
        return
    print(f"Installing {', '.join(names)} ...")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(
            f"Could not install {', '.join(names)}. Run this in a cell to see why: "
            f"!pip install --no-deps {' '.join(names)}"
        )
