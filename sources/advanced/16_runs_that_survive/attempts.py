"""Saves and loads that are to fail: each tried on ranks, and what came of it as a line."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader

from utils.parallel import list_checkpoints
from utils.ranks import RankError, run_ranks

RANKS = 2


def told(function: Callable[..., Any], *args: Any) -> str:
    """What rank 0 of two returned, or the last line of why the ranks failed."""
    try:
        return str(run_ranks(function, RANKS, *args)[0])
    except RankError as error:
        last = str(error).strip().splitlines()[-1].split("Error: ")[-1].partition("; rank local")[0]
        folders = {str(arg.parent) for arg in args if isinstance(arg, Path)}
        for folder in sorted(folders, key=len, reverse=True):
            last = last.replace(f"{folder}/", "")
        return f"failed: {last}"


def damaged_copy(folder: Path, change: Callable[[Path], object]) -> Path:
    """A copy of a folder of checkpoints, a new one at each call, with a change to each of them."""
    copy = Path(tempfile.mkdtemp(dir=folder.parent)) / folder.name
    shutil.copytree(folder, copy)
    for path in list_checkpoints(copy):
        change(path)
    return copy


def change_a_byte(path: Path) -> None:
    """Change one byte of rank 0's file: the exponent of one number in the middle of its embedding."""
    stored = FileSystemReader(path).read_metadata().storage_data
    piece = next(where for index, where in stored.items() if _is_weight(index.fqn, where))
    data = bytearray((path / piece.relative_path).read_bytes())
    # The numbers of a saved tensor begin at a multiple of 64 bytes, so that each fourth byte is a last one.
    data[piece.offset + piece.length // 8 * 4 + 3] ^= 0x08
    (path / piece.relative_path).write_bytes(data)


def _is_weight(name: str, where: Any) -> bool:
    return name == "model.embed.weight" and where.relative_path.startswith("__0_")


def lose_a_rank(path: Path) -> None:
    """Remove a file of rank 1's."""
    next(path.glob("__1_*.distcp")).unlink()
