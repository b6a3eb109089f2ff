"""What one rank sends for a layer of a real model, by section 3's formulas."""

from __future__ import annotations

from utils.catalog import model_shape
from utils.catalog.rules import above_zero
from utils.checked import check_public

__all__ = ["told_megabytes"]

BF16_BYTES = 2


def told_megabytes(name: str, ranks: int, length: int) -> str:
    """A line: MB that one of `ranks` sends for a layer, forward and backward, by each way.

    Around a ring keys travel in bf16 and their gradients in fp32; elsewhere all is bf16.

    Args:
        name: of a published shape.
        ranks: that share a sequence.
        length: tokens of that sequence.
    """
    above_zero("told_megabytes()", ranks=ranks, length=length)
    shape = model_shape(name)
    heads, kv_heads = shape.heads, shape.key_value_heads
    unit = length / ranks * shape.head_dim * BF16_BYTES / 1e6
    ring, checkpointed = (
        (count * ranks - rest) * kv_heads * unit for count, rest in ((8, 4), (10, 6))
    )
    gathered = 4 * (ranks - 1) * kv_heads * unit
    by_heads = (ranks - 1) / ranks * 4 * (heads + max(kv_heads, ranks)) * unit
    ulysses = f"{by_heads:,.0f}" if heads % ranks == 0 else f"{ranks} does not divide {heads}"
    return (
        f"{name:<11} n {ranks:>2}, A {heads}, K {kv_heads}: ring {ring:,.0f}, with checkpoints {checkpointed:,.0f}; "
        f"gathered {gathered:,.0f}; Ulysses {ulysses}"
    )


check_public(globals())
