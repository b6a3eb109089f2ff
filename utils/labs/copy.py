"""The learner's copies of the labs: made once, never overwritten."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from utils.files import write_whole


@dataclass(frozen=True)
class Copied:
    """The labs that were copied and those that were there already, as paths in `my_labs`."""

    copied: tuple[Path, ...]
    kept: tuple[Path, ...]


def copy_labs(labs: Path, my_labs: Path) -> Copied:
    """Copy each lab that `my_labs` does not have; touch nothing that is there.

    Raises:
        FileNotFoundError: there are no labs to copy.
        OSError: `my_labs` cannot be written to.
    """
    notebooks = sorted(p for p in labs.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
    if not notebooks:
        raise FileNotFoundError(f"There are no labs in {labs}. `make notebooks` builds them.")
    copied, kept = [], []
    for source in notebooks:
        inner = source.relative_to(labs)
        is_new = copy_once(source, my_labs / inner)
        (copied if is_new else kept).append(inner)
    return Copied(tuple(copied), tuple(kept))


def copy_once(source: Path, target: Path) -> bool:
    """Copy a file unless the target is there; whole or not at all. True if it was copied."""
    if target.exists():
        return False
    write_whole(target, source.read_bytes())
    return True
