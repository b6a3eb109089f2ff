"""What one rank sends for a layer of a real model, by section 3's formulas."""

from __future__ import annotations

from utils.catalog import model_shape
from utils.catalog.rules import above_zero
from utils.checked import check_public

__all__ = ["told_megabytes"]

BF16_BYTES = 2


def told_megabytes(name: str, ranks: int, length: int) -> str:
    """A line: MB that one of `ranks` sends for a layer by each way, under checkpoints: forward runs twice.

    Gradients that ranks add up travel in fp32, all else in bf16: Ulysses adds none up. Where heads do not divide over the ranks, Ulysses goes over the most that they
    divide over, and a ring over the rest.

    Args:
        name: of a published shape.
        ranks: that share a sequence.
        length: tokens of that sequence.
    """
    above_zero("told_megabytes()", ranks=ranks, length=length)
    shape = model_shape(name)
    heads, kv_heads = shape.heads, shape.key_value_heads
    unit = length / ranks * shape.head_dim * BF16_BYTES / 1e6
    by_heads = max(
        n for n in range(1, ranks + 1) if heads % n == ranks % n == 0 and _whole(kv_heads, n)
    )
    around, copies = ranks // by_heads, max(kv_heads, by_heads)
    exchanged = "Ulysses" if around == 1 else f"Ulysses {by_heads} x ring {around}"
    ways = {
        "ring": _ring(ranks) * kv_heads,
        "gathered": 8 * (ranks - 1) * kv_heads,
        exchanged: 6 * (by_heads - 1) / by_heads * (heads + copies) + _ring(around) * copies,
    }
    told = (f"{way} {numbers * unit:,.0f}" for way, numbers in ways.items())
    return f"{name} over {ranks} GPUs, {heads} query and {kv_heads} key heads: " + ", ".join(told)


def _whole(kv_heads: int, ranks: int) -> bool:
    """Whether each rank gets whole key-value heads, or whole copies."""
    return kv_heads % ranks == 0 or ranks % kv_heads == 0


def _ring(ranks: int) -> int:
    """Moves in units of bf16 numbers: keys thrice around, gradients once and of double size."""
    return 10 * ranks - 6 if ranks > 1 else 0


check_public(globals())
