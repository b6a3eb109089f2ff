"""The printed tables of lesson 19's two choices, rows or weights: inside a node and across nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .published import STEP_MICRO_BATCH, STEP_SOURCE, STEP_TFLOPS, STEP_TOKENS

Parts = tuple[float, float, float, float]


def print_seconds(
    parts: Callable[[int, str], Parts],
    seconds: Callable[..., float],
    tokens: Sequence[int],
    assumed: str,
) -> None:
    """Seconds of a step, part by part and then in all: EP 8 at load 1 beside FSDP alone.

    Args:
        parts: seconds of all but the experts, of the experts, of rows and of weights, by (tokens, layout).
        seconds: of a whole step, by (tokens, layout, overlap=...).
        tokens: of a rank and micro-batch.
        assumed: constants, as the title says them.
    """
    ours, alone = "EP 8", "FSDP alone"
    computed = [sum(parts(n, alone)[:2]) for n in tokens]
    whole = {
        overlap: [seconds(n, alone, overlap=overlap) for n in tokens] for overlap in (True, False)
    }
    exposed = {
        overlap: [step - busy for step, busy in zip(steps, computed, strict=True)]
        for overlap, steps in whole.items()
    }
    table = {
        "computing, all but the experts": [parts(n, ours)[0] for n in tokens],
        "computing, the experts at load 1": [parts(n, ours)[1] for n in tokens],
        f"{ours}: rows at load 1": [parts(n, ours)[2] for n in tokens],
        f"{alone}: weights and gradients": [parts(n, alone)[3] for n in tokens],
        "  exposed, if they overlap computing": exposed[True],
        "  exposed, if computing waits": exposed[False],
        f"a step of {ours} at load 1": [seconds(n, ours) for n in tokens],
        f"a step of {alone}, if weights overlap": whole[True],
        f"a step of {alone}, if computing waits": whole[False],
    }
    print(f"predicted: seconds of a micro-batch, {assumed}, by its tokens a rank")
    wide = max(map(len, table))
    print(" " * (wide + 2), *(f"{n:>8,}" for n in tokens))
    for name, row in table.items():
        print(f"  {name:<{wide}}", *(f"{part:>8.2f}" for part in row))


def print_break_even(
    title: str,
    load_of: Callable[..., float],
    tokens: Sequence[int],
    cases: Mapping[str, Mapping[str, Any]],
    constants: Sequence[Mapping[str, float]],
    worst: int,
) -> None:
    """Loads at which two ways take equally long: as assumed, and the least and most as constants are changed.

    Args:
        title: what holds up to that load.
        load_of: that load, by (tokens, **case, **changed).
        tokens: of a rank and micro-batch.
        cases: {name: what it asks}.
        constants: each with one of them changed.
        worst: the largest load there is, where all rows come to one rank.
    """
    print(f"predicted: {title}; columns: tokens a rank and micro-batch")
    wide = max(map(len, cases))
    print(" " * (wide + 2), *(f"{n:,}".rjust(17) for n in tokens), sep="")
    for name, case in cases.items():
        cells = []
        for n in tokens:
            found = [load_of(n, **case, **changed) for changed in ({}, *constants)]
            cells.append(_range(found[0], min(found), max(found), worst).rjust(17))
        print(f"  {name:<{wide}}", *cells, sep="")


def _range(middle: float, low: float, high: float, worst: int) -> str:
    said = [_load(load, worst) for load in (middle, low, high)]
    return said[0] if len(set(said)) == 1 else f"{said[0]} ({said[1]} to {said[2]})"


def _load(load: float, worst: int) -> str:
    return "<1" if load < 1 else f">{worst}" if load > worst else f"{load:.1f}"


def print_step(rates: Mapping[float, float], assumed: float, evenly: float) -> None:
    """A whole step that others measured, beside what is predicted.

    Args:
        rates: {TFLOP/s: tokens/s}.
        assumed: the TFLOP/s of all other tables.
        evenly: tokens/s at that speed, were experts drawn evenly.
    """
    print(
        f"published, Qwen3-30B-A3B, EP 8 with DeepEP on 8 H100, {STEP_MICRO_BATCH:,} tokens a rank and micro-batch, layers recomputed,\n"
        f"  load forced to 1: {STEP_TOKENS:,.0f} tokens/s a GPU, {STEP_TFLOPS:.0f} TFLOP/s without what is recomputed\n"
        f"  ({STEP_SOURCE})\n"
        "predicted, if a GPU computes at"
    )
    for speed, rate in rates.items():
        print(
            f"  {speed:g} TFLOP/s: {rate:>6,.0f} tokens/s; predicted / published {rate / STEP_TOKENS:.2f}"
        )
    print(f"and at {assumed:g} TFLOP/s with experts drawn evenly: {evenly:,.0f} tokens/s")
