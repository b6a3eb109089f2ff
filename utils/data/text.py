"""Real text that every machine has: the sources of Python's own standard library.

As bytes for pretraining, and as questions with answers for fine-tuning.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256
MOST_PAIRS = 5000  # every version of the standard library documents more functions
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def text_tokens(length_tokens: int = 1_000_000, folder: str | Path | None = None) -> Tensor:
    """The first bytes of the standard library's .py files in order of name: uint8 (length,).

    Each byte is a token, so the vocabulary has 256. Comments and docstrings make about half of
    it English. The text differs between versions of Python.

    Args:
        length_tokens: Number of tokens.
        folder: Another folder of .py files.

    Raises:
        ValueError: the length is not positive, or the files hold less.
    """
    if length_tokens < 1:
        raise ValueError(f"length_tokens is {length_tokens}; ask for 1 or more.")
    library = Path(folder or sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in _sources(library):
        text += path.read_bytes()
        if len(text) >= length_tokens:
            return torch.frombuffer(text[:length_tokens], dtype=torch.uint8)
    raise ValueError(
        f"The .py files in {library} hold {len(text):,} bytes; ask for no more tokens than that."
    )


def docstring_pairs(count: int) -> list[tuple[str, str]]:
    """Prompts and answers: a function's first line, and the first line of what is said of it.

    The first `count` documented functions of the standard library, in order of file name. They
    differ between versions of Python.

    Raises:
        ValueError: the count is not positive, or the library documents fewer.
    """
    if not 1 <= count <= MOST_PAIRS:
        raise ValueError(f"count is {count:,}; ask for 1 to {MOST_PAIRS:,}.")
    pairs: list[tuple[str, str]] = []
    for path in _sources(Path(sysconfig.get_path("stdlib"))):
        pairs += _documented(path)
        if len(pairs) >= count:
            return pairs[:count]
    raise ValueError(
        f"The standard library here documents {len(pairs):,} functions; ask for fewer."
    )


def _documented(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.FunctionDef) and (told := ast.get_docstring(node)):
            prompt = f"def {node.name}({ast.unparse(node.args)}):\n"
            yield prompt, told.partition("\n")[0]


def _sources(folder: Path) -> Iterator[Path]:
    """All .py files below a folder: its own first, then those of its packages, by name."""
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    yield from (entry for entry in entries if entry.suffix == ".py" and entry.is_file())
    for entry in entries:
        if entry.is_dir() and entry.name not in _SKIPPED:
            yield from _sources(entry)


def text_batches(
    tokens: Tensor, batch: int, sequence: int, seed: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Once through the text in random order: inputs and targets, int64 (batch, sequence).

    A target is the token after its input. The text is cut into windows of `sequence` tokens; the
    windows that fill no whole batch are left out.

    Raises:
        ValueError: the sizes are not positive, or the text is too short for one batch.
    """
    if tokens.dim() != 1 or tokens.is_floating_point():
        raise ValueError(
            f"tokens is of shape {tuple(tokens.shape)} and {tokens.dtype}; give whole numbers in one "
            "row, as text_tokens does."
        )
    if min(batch, sequence) < 1:
        raise ValueError(f"batch {batch} and sequence {sequence} must be 1 or more.")
    windows = (len(tokens) - 1) // sequence
    if windows < batch:
        raise ValueError(
            f"{len(tokens):,} tokens are too few for a batch of {batch} x {sequence}: "
            f"ask text_tokens for {batch * sequence + 1:,} or more."
        )
    order = torch.randperm(windows, generator=torch.Generator().manual_seed(seed))
    starts = order[: windows // batch * batch].view(-1, batch, 1) * sequence
    places = starts + torch.arange(sequence)
    return ((tokens[place].long(), tokens[place + 1].long()) for place in places)
