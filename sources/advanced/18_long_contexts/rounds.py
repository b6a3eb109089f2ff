"""Rounds of a ring: pairs of a query and a key that each rank computes, and how long they take."""

from __future__ import annotations

from collections.abc import Sequence

from utils.catalog import ModelShape
from utils.checked import check_public
from utils.rules import above_zero

__all__ = ["hides_from", "pairs_of", "round_ends", "round_seconds"]


def pairs_of(queries: int, keys: int, causal: bool) -> int:
    """Pairs of a query and a key it sees; causal: query i sees keys 0 to i."""
    return queries * (queries + 1) // 2 if causal else queries * keys


def round_ends(pairs: Sequence[Sequence[int]]) -> list[int]:
    """When each round ends, counted in pairs: a round lasts as long as its busiest rank computes.

    Args:
        pairs: by rank, those of each round.
    """
    if not pairs:
        raise ValueError("round_ends() needs the pairs of one rank or more.")
    ends, now = list[int](), 0
    for of_round in zip(*pairs, strict=True):
        now += max(of_round)
        ends.append(now)
    return ends


def round_seconds(
    shape: ModelShape, bandwidth: float, tokens: int, flops: float
) -> tuple[float, float, float, float]:
    """Of one zigzag round in one layer: forward's attention and its message, then backward's.

    Rates alone, without latency.

    Args:
        shape: of the model.
        bandwidth: bytes a second that a rank sends.
        tokens: of a rank.
        flops: of its attention, a second.
    """
    above_zero("round_seconds()", bandwidth=bandwidth, tokens=tokens, flops=flops)
    forward = 2 * shape.heads * shape.head_dim * tokens**2 / flops  # a half of all pairs
    message = 4 * shape.key_value_heads * shape.head_dim * tokens / bandwidth  # in bf16
    return forward, message, 2.5 * forward, 3 * message  # fp32 gradients are two more messages


def hides_from(tokens: int, work: float, message: float) -> float:
    """Tokens of a rank from which a round's message takes no longer than its work.

    Work grows with the square of the tokens, what a message carries with the tokens.

    Args:
        tokens: of a rank, in the round that was timed.
        work, message: that round's seconds.
    """
    above_zero("hides_from()", tokens=tokens, work=work, message=message)
    return tokens * message / work


check_public(globals())
