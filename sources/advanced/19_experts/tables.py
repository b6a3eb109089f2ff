"""The printed tables of lesson 19's two choices: rows or weights, inside a node and across nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .at_size import TOKENS, qwen3_flops
from .published import DEEPEP_TFLOPS, DEEPEP_TOKENS, STEPS

_MOST = 30_000  # beyond it a number of tokens hangs on the last digits of two links


def print_tokens(title: str, speeds: Sequence[float], table: Mapping[str, Sequence[float]]) -> None:
    """Tokens a rank below which `title` holds: a column for each speed where weights hide, and one where they do not."""
    print(f"predicted: {title} with fewer tokens a rank and micro-batch than")
    shown = [f"{speed:g} TFLOP/s" for speed in speeds]
    print(f"{'where weights hide, at':<42}", *(f"{name:>12}" for name in [*shown, "not hidden"]))
    for name, counts in table.items():
        cells = [f"{n:,.0f}" if n < _MOST else f"over {_MOST:,}" for n in counts]
        print(f"  {name:<40}", *(f"{cell:>12}" for cell in cells))


def print_published() -> None:
    """Whole steps that others measured, as tokens and products per second of one GPU."""
    print("published, whole steps of Qwen3-30B-A3B, its experts shared by all GPUs of a node;")
    print('"about": reckoned from the tokens; what is recomputed is not counted:')
    for name, tokens, counted, length, source in STEPS:
        each = qwen3_flops(length) / TOKENS / 1e12 if length else DEEPEP_TFLOPS / DEEPEP_TOKENS
        tflops = f"{'' if counted else 'about':>5} {counted or tokens * each:3.0f} TFLOP/s"
        print(f"  {name:<27} {tokens:>7,.0f} tokens/s a GPU, {tflops} ({source})")
