"""The printed tables of lesson 19's two choices, rows or weights: inside a node and across nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from utils.catalog import device

from .at_size import step_parts
from .published import STEP_MICRO_BATCH, STEP_SOURCE, STEP_TFLOPS, STEP_TOKENS


def print_loads(
    title: str,
    load_of: Callable[..., float],
    tokens: Sequence[int],
    cases: Mapping[str, Mapping[str, Any]],
    worst: int,
) -> None:
    """Loads up to which `title` holds: a row for each case, a column for each number of a rank's tokens.

    The columns stand twice, for weights that overlap computing and for computing that waits for them.
    No load is below 1, and none above `worst`, where all rows come to one rank.

    Args:
        title: what holds.
        load_of: that load, by (tokens, overlap=..., **case).
        tokens: of a rank and micro-batch.
        cases: {name: what it changes}.
        worst: the largest load there is.
    """
    print(f"predicted: {title}")
    print(f"(never: below 1; always: over {worst}); columns: tokens a rank and micro-batch")
    wide, block = max(map(len, cases)), 9 * len(tokens)
    branches = "weights overlap computing", "computing waits for weights"
    print(" " * (wide + 2), *(said.rjust(block) for said in branches), sep="  ")
    print(" " * (wide + 2), *("".join(f"{n:>9,}" for n in tokens) for _ in branches), sep="  ")
    for name, case in cases.items():
        blocks = [
            "".join(_load(load_of(n, overlap=overlap, **case), worst).rjust(9) for n in tokens)
            for overlap in (True, False)
        ]
        print(f"  {name:<{wide}}", *blocks, sep="  ")


def _load(load: float, worst: int) -> str:
    return "never" if load < 1 else "always" if load >= worst else f"{load:.1f}"


def print_seconds(tokens: Sequence[int], speed: float, rows: float, weights: float) -> None:
    """Seconds of a step's parts: computing, EP 8's rows, and FSDP's weights with what of them is exposed.

    Args:
        tokens: of a rank and micro-batch.
        speed: TFLOP/s assumed.
        rows: seconds of a token's rows.
        weights: seconds of a step's weights and gradients.
    """
    parts = [step_parts(n, speed) for n in tokens]
    table = {
        "computing, all but the experts": [rest for rest, _ in parts],
        "computing, the experts": [experts for _, experts in parts],
        "EP 8, rows at load 1": [rows * n for n in tokens],
        "FSDP alone, weights and gradients": [weights] * len(tokens),
        "  exposed, if they overlap computing": [max(0.0, weights - sum(part)) for part in parts],
        "  exposed, if computing waits": [weights] * len(tokens),
    }
    print(f"predicted: seconds of a step at {speed:g} TFLOP/s, by tokens a rank and micro-batch")
    wide = max(map(len, table))
    print(" " * (wide + 2), *(f"{n:>8,}" for n in tokens))
    for name, seconds in table.items():
        print(f"  {name:<{wide}}", *(f"{part:>8.2f}" for part in seconds))


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
    cases = {
        f"{speed:g} TFLOP/s, a row for each expert": {},
        "  FSDP's experts at half speed": {"slower": 2},
        "  half of the rows' time hidden": {"rows": rows / 2},
        "  a vector once a rank": {"rows": once},
        f"  {speed / 2:g} TFLOP/s, or NVLink twice as fast": {"speed": speed / 2},
        f"  {speed * 2:g} TFLOP/s, or NVLink half as fast": {"speed": speed * 2},
    }
    title = f"EP 8 is faster than FSDP alone, up to this load, at {speed:g} TFLOP/s"
    print_loads(title, load_of, tokens, cases, worst=8)
    each = [n * 8 // 128 for n in tokens]
    wide = max(map(len, cases)) + 2
    print("FSDP alone: rows of an expert".ljust(wide), "".join(f"{n:>9,}" for n in each), sep="  ")
    print(
        "  memory allows, TFLOP/s".ljust(wide),
        "".join(f"{_allowed(n):>9,.0f}" for n in each),
        sep="  ",
    )


def _allowed(rows: int) -> float:
    """TFLOP/s of one of Qwen3-30B-A3B's experts in bf16, if its weights and rows come from memory, and go there."""
    h100, hidden, width = device("H100"), 2048, 768
    assert h100.bf16_tflops is not None
    weights = 3 * hidden * width
    moved = 2 * (weights + rows * (hidden + 2 * width + width + hidden))  # in, gate and up, in, out
    return min(2 * rows * weights / moved * h100.memory_bytes_per_second / 1e12, h100.bf16_tflops)


def print_across(
    load_of: Callable[..., float], tokens: Sequence[int], speed: float, ndr: float, plain: str
) -> None:
    """Two nodes, with one assumption at a time changed.

    Args:
        load_of: up to which EP 16 is faster than EP 8, over EP 8's load, by (tokens, **case).
        tokens: of a rank and micro-batch.
        speed: TFLOP/s assumed.
        ndr: bytes a second between nodes assumed.
        plain: the name of the layout without a dispatcher.
    """
    cases: dict[str, dict[str, Any]] = {
        f"a dispatcher, {speed:g} TFLOP/s, EP 8 at load 1": {},
        "  EP 8 at load 1.5": {"load": 1.5},
        f"  {speed / 2:g} TFLOP/s": {"speed": speed / 2},
        f"  {speed * 2:g} TFLOP/s": {"speed": speed * 2},
        "  InfiniBand twice as fast": {"ndr": ndr * 2},
        "  InfiniBand half as fast": {"ndr": ndr / 2},
        "  a plain all-to-all": {"layout": plain},
    }
    title = "EP 16 is faster than EP 8, up to this many times EP 8's load, both networks at once"
    print_loads(title, load_of, tokens, cases, worst=16)


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
