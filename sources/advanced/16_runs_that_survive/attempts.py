"""Saves and loads that are to fail: each tried on ranks, and what came of it as a line."""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
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
    """A copy of a folder of checkpoints, a new one at each call, with a change to what was saved last."""
    copy = Path(tempfile.mkdtemp(dir=folder.parent)) / folder.name
    shutil.copytree(folder, copy)
    change(list_checkpoints(copy)[0])
    return copy


def change_a_byte(path: Path) -> tuple[float, float]:
    """Change one byte of rank 0's file, of a number in the output layer that every step uses.

    The byte holds the exponent: the number becomes 256 times as large.

    Returns:
        The number before and after.
    """
    stored = FileSystemReader(path).read_metadata().storage_data
    piece = next(where for index, where in stored.items() if _is_weight(index.fqn, where))
    file = path / piece.relative_path
    data = bytearray(file.read_bytes())
    kept = data[piece.offset : piece.offset + piece.length]
    weight = torch.load(io.BytesIO(kept), weights_only=True).contiguous().flatten()
    place = int(((weight.abs() >= 2.0**-8) & (weight.abs() < 2.0**-7)).nonzero()[0])
    start = data.index(weight.numpy().tobytes(), piece.offset)
    data[start + 4 * place + 3] ^= 0x04  # sets a bit of the exponent that is not set below 2 ** -7
    file.write_bytes(data)
    changed = torch.frombuffer(data, dtype=torch.float32, count=1, offset=start + 4 * place)
    return weight[place].item(), changed.item()


def _is_weight(name: str, where: Any) -> bool:
    return name == "model.head.weight" and where.relative_path.startswith("__0_")
