"""The printed tables of lesson 19's two choices, rows or weights: inside a node and across nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from utils.catalog import device

from .published import STEP_MICRO_BATCH, STEP_SOURCE, STEP_TFLOPS, STEP_TOKENS


def print_loads(
    title: str, tokens: Sequence[int], table: Mapping[str, Sequence[float]], worst: int
) -> None:
    """Loads up to which `title` holds: a row for each case, a column for each number of a rank's tokens.

    No load is below 1, and none above `worst`, where all rows come to one rank.
    """
    print(f"predicted: {title}")
    print(f"(never: below 1; always: over {worst}); columns: tokens a rank and micro-batch")
    wide = max(map(len, table))
    print(" " * (wide + 2), *(f"{n:,}".rjust(8) for n in tokens))
    for name, loads in table.items():
        print(f"  {name:<{wide}}", *(_load(load, worst).rjust(8) for load in loads))


def _load(load: float, worst: int) -> str:
    return "never" if load < 1 else "always" if load >= worst else f"{load:.1f}"


def print_choice(
    load_of: Callable[..., float], tokens: Sequence[int], rows: float, once: float, speed: float
) -> None:
    """Rows or weights on one node, with one assumption at a time changed, and how many rows an expert gets.

    Args:
        load_of: up to which EP 8 is faster than FSDP alone, by (tokens, **case).
        tokens: of a rank and micro-batch.
        rows: seconds of a token's rows, one for each expert.
        once: seconds of a token's rows, one for each rank.
        speed: TFLOP/s assumed.
    """
    shown = {"hidden": False}
    cases: dict[str, dict[str, Any]] = {
        "weights hidden": {},
        "  FSDP's experts at half speed": {"slower": 2},
        "  half of the rows' time hidden": {"rows": rows / 2},
        "  a vector once a rank": {"rows": once},
        f"  {speed / 2:g} TFLOP/s": {"speed": speed / 2},
        f"  {speed * 2:g} TFLOP/s": {"speed": speed * 2},
        "weights not hidden": shown,
        "  FSDP's experts at half speed ": {"slower": 2, **shown},
        "  half of the rows' time hidden ": {"rows": rows / 2, **shown},
    }
    table = {name: [load_of(n, **case) for n in tokens] for name, case in cases.items()}
    title = f"EP 8 is faster than FSDP alone, up to this load, at {speed:g} TFLOP/s"
    print_loads(title, tokens, table, worst=8)
    h100 = device("H100")
    assert h100.bf16_tflops is not None
    each = [n * 8 / 128 for n in tokens]  # a weight is 2 bytes, and makes 2 FLOP with each row
    most = [min(n * h100.memory_bytes_per_second / 1e12, h100.bf16_tflops) for n in each]
    wide = max(map(len, table)) + 2
    print("FSDP alone: rows of an expert".ljust(wide), *(f"{n:>8,.0f}" for n in each))
    print("  memory allows, TFLOP/s".ljust(wide), *(f"{n:>8,.0f}" for n in most))


def print_step(rates: Mapping[float, float], evenly: float) -> None:
    """A whole step that others measured, beside what is predicted.

    Args:
        rates: {TFLOP/s: tokens/s}; the middle one is assumed.
        evenly: tokens/s at that speed, were experts drawn evenly.
    """
    print(
        f"published, Qwen3-30B-A3B, EP 8 with DeepEP on 8 H100, {STEP_MICRO_BATCH:,} tokens a rank, layers recomputed,\n"
        f"  load forced to 1: {STEP_TOKENS:,.0f} tokens/s a GPU, {STEP_TFLOPS:.0f} TFLOP/s without what is recomputed\n"
        f"  ({STEP_SOURCE})\n"
        "predicted, if a GPU computes at"
    )
    for speed, rate in rates.items():
        print(
            f"  {speed:g} TFLOP/s: {rate:>6,.0f} tokens/s; predicted / published {rate / STEP_TOKENS:.2f}"
        )
    middle = list(rates)[len(rates) // 2]
    print(f"and at {middle:g} TFLOP/s with experts drawn evenly: {evenly:,.0f} tokens/s")
