"""The printed tables of lesson 19's two choices, rows or weights: inside a node and across nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .at_size import TOKENS
from .published import STEP_SOURCE, STEP_TFLOPS, STEP_TOKENS

MOST_TOKENS = 3 * TOKENS  # a fourth sequence's logits, made at once, do not fit an H100


def most_tokens(is_faster: Callable[[int], bool]) -> int:
    """The most tokens of a rank, up to `MOST_TOKENS`, for which `is_faster` holds, as it does for all fewer."""
    low, high = 0, MOST_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_faster(middle) else (low, middle - 1)
    return low


def print_tokens(title: str, speeds: Sequence[float], table: Mapping[str, Sequence[int]]) -> None:
    """Tokens of a rank up to which `title` holds: a row for each case, a column for each speed."""
    print(f"predicted: {title} up to this many tokens a rank and micro-batch, at")
    wide = max(map(len, table))
    print(" " * (wide + 2), *(f"{speed:g} TFLOP/s".rjust(12) for speed in speeds))
    for name, counts in table.items():
        cells = (f"{n:,}" if n < MOST_TOKENS else f"over {MOST_TOKENS:,}" for n in counts)
        print(f"  {name:<{wide}}", *(cell.rjust(12) for cell in cells))


def print_published() -> None:
    """A whole step that others measured."""
    print(
        f"published, Qwen3-30B-A3B, EP 8 with DeepEP on 8 H100, load forced to 1: {STEP_TOKENS:,.0f} tokens/s a GPU,"
    )
    print(
        f"  {STEP_TFLOPS:.0f} TFLOP/s over the whole step, without what is recomputed ({STEP_SOURCE})"
    )
