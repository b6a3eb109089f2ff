"""Pairs of a query and a key that each rank of a ring computes, round by round."""

from __future__ import annotations

from collections.abc import Sequence

from utils.checked import check_public

__all__ = ["pairs_of", "round_ends"]


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


check_public(globals())
