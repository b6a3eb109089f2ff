"""The standard library's modules, split into what a small model is trained on and what it never sees.

They differ a little between versions of Python, and so does every loss on them.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from utils.data.text import text_batches

HELD_OUT = ("calendar.py", "difflib.py", "fractions.py", "heapq.py", "statistics.py", "textwrap.py")
LENGTH = 128  # tokens of a sequence


def training_tokens() -> Tensor:
    """All modules at the top of the standard library but for `HELD_OUT`, by name: uint8 (tokens,)."""
    return _joined(path for path in sorted(_folder().glob("*.py")) if path.name not in HELD_OUT)


def held_out_tokens() -> Tensor:
    """The modules of `HELD_OUT`, one after the other: uint8 (tokens,)."""
    return _joined(_folder() / name for name in HELD_OUT)


def calibration_tokens(sequences: int = 32, seed: int = 1) -> Tensor:
    """Sequences drawn from the training text: int64 (sequences, LENGTH)."""
    return next(text_batches(training_tokens(), sequences, LENGTH, seed))[0]


def held_out_sequences(sequences: int = 192) -> Tensor:
    """Sequences drawn from the held-out text, always the same: int64 (sequences, LENGTH + 1)."""
    inputs, targets = next(text_batches(held_out_tokens(), sequences, LENGTH))
    return torch.cat([inputs, targets[:, -1:]], dim=1)


def _folder() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _joined(paths: Iterable[Path]) -> Tensor:
    text = bytearray(b"".join(path.read_bytes() for path in paths))
    return torch.frombuffer(text, dtype=torch.uint8)
